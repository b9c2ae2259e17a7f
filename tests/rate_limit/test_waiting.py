import pytest

from rate_limit.waiting import Steps, run


def test_an_error_of_the_sleep_is_not_taken_for_the_end_of_the_steps():
    cleaned_up: list[bool] = []

    def steps() -> Steps[str]:
        try:
            yield 1.0
        finally:
            cleaned_up.append(True)
        return "done"

    def sleep(seconds: float) -> None:
        raise StopIteration

    with pytest.raises(StopIteration):
        run(steps(), sleep)
    assert cleaned_up == [True]
    assert run(steps(), lambda seconds: None) == "done"
