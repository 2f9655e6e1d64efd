from .engine import reset_stats, stats
from . import operators
from .enable import enable, disable, is_enabled
