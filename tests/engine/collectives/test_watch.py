"""What is under way among GPUs: the last operation of each group, and whether torch's watchdog may end the process."""

import pytest

from headrace.engine.collectives.watch import OperationWatch, leave_errors_to_us


class Work:
    """Stands in for dist.Work."""

    def __init__(self, *, done: bool = False, error: str = "") -> None:
        self.done, self.error = done, error

    def is_completed(self) -> bool:
        return self.done or bool(self.error)

    def exception(self) -> object:
        return RuntimeError(self.error) if self.error else None


def test_the_last_operation_of_each_group_is_known() -> None:
    watch = OperationWatch()
    tokens = Work()
    for number in range(1000):
        watch.add("all_reduce", "tp", Work(done=number < 999))
        watch.add("broadcast", "tokens", tokens)
    assert sorted(watch.unfinished()) == ["all_reduce of tp", "broadcast of tokens"]
    assert len(watch._last) == 2, "each keeps its result"
    tokens.done = True
    watch.drop_done()
    assert len(watch._last) == 1
    assert watch.unfinished() == ["all_reduce of tp"]


def test_a_failure_is_told_and_kept() -> None:
    watch = OperationWatch()
    watch.add("all_gather", "dp", Work())
    assert watch.failure() == ""
    watch.add("all_gather", "dp", Work(error="remote process exited"))
    watch.drop_done()
    assert watch.failure() == "all_gather of dp has failed: remote process exited"


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        ({}, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}, {"TORCH_NCCL_ENABLE_MONITORING": "0"}),
        ({"NCCL_ASYNC_ERROR_HANDLING": "1"}, {"TORCH_NCCL_ENABLE_MONITORING": "0"}),
        ({"TORCH_NCCL_ENABLE_MONITORING": "1"}, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}),
    ],
)
def test_the_watchdog_ends_no_process_unless_the_environment_says_so(
    given: dict[str, str], changed: dict[str, str]
) -> None:
    environment = dict(given)
    leave_errors_to_us(environment)
    assert environment == given | changed
