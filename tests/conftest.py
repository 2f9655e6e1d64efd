from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from backnorm import acl, functional, plan, threads
from backnorm.acl.runtime import runtime

settings.register_profile(
    "backnorm", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.load_profile("backnorm")


@pytest.fixture
def ready() -> Iterator[None]:
    """An initialized runtime with device 0 set; what a test leaves behind ends with it."""
    assert acl.init() == 0
    assert acl.rt.set_device(0) == 0
    acl.get_recent_err_msg()
    yield
    acl.finalize()


@pytest.fixture(autouse=True)
def default_product() -> Iterator[None]:
    """Tests that choose a product leave none behind."""
    yield
    runtime._chosen_soc = None


def forget_plans() -> None:
    """And known calls, so that changed numbers of a tiling count."""
    functional.kind_of_call.cache_clear()
    functional._known.clear()
    plan._make_plan.cache_clear()


@pytest.fixture
def small_work_is_shared_out(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Among as many threads as a test asks for; afterwards there are as many as before. Known calls would be run by
    their caller alone."""
    before = threads._num_threads
    monkeypatch.setattr(threads, "_ELEMENTS_A_THREAD", 1)
    forget_plans()
    yield
    threads._num_threads = before
    forget_plans()
