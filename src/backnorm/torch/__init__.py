from .engine import reset_stats, stats
from . import operators
