"""Schedule: what is accepted, what is refused, and which factor holds where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_accum import AccumulationScheduler
from lightning_accum.schedule.factors import Schedule

WAY_OUT_OF_A_FACTOR = "must be an int >= 1"


@pytest.mark.parametrize(
    ("scheduling", "error", "given", "way_out"),
    [
        pytest.param({}, ValueError, r"scheduling=\{\}", r"empty\. Give \{start: factor\}.*or an int", id="empty"),
        pytest.param("4", TypeError, "scheduling='4'", WAY_OUT_OF_A_FACTOR, id="a string"),
        pytest.param(2.0, TypeError, r"scheduling=2\.0", WAY_OUT_OF_A_FACTOR, id="a float"),
        pytest.param([4], TypeError, r"scheduling=\[4\]", WAY_OUT_OF_A_FACTOR, id="a list"),
        pytest.param(True, TypeError, "scheduling=True", WAY_OUT_OF_A_FACTOR, id="True"),
        pytest.param(0, ValueError, "scheduling=0", WAY_OUT_OF_A_FACTOR, id="zero"),
        pytest.param(-2, ValueError, "scheduling=-2", WAY_OUT_OF_A_FACTOR, id="negative"),
        pytest.param({3: 0}, ValueError, r"scheduling=\{3: 0\}", f"epoch 3 on {WAY_OUT_OF_A_FACTOR}", id="factor 0"),
        pytest.param({3: -1}, ValueError, r"scheduling=\{3: -1\}", f"epoch 3 on {WAY_OUT_OF_A_FACTOR}", id="factor -1"),
        pytest.param({3: True}, TypeError, r"\{3: True\}", f"epoch 3 on {WAY_OUT_OF_A_FACTOR}", id="factor True"),
        pytest.param({3: "4"}, TypeError, r"\{3: '4'\}", f"epoch 3 on {WAY_OUT_OF_A_FACTOR}", id="factor a string"),
        pytest.param({3: None}, TypeError, r"\{3: None\}", f"epoch 3 on {WAY_OUT_OF_A_FACTOR}", id="factor None"),
        pytest.param({-1: 2}, ValueError, r"\{-1: 2\}", "start must be >= 0.*got -1", id="start -1"),
        pytest.param({"-1": 2}, ValueError, r"\{'-1': 2\}", "start must be >= 0.*got -1", id="start '-1'"),
        pytest.param({True: 2}, TypeError, r"\{True: 2\}", "start must be an int.*got True", id="start True"),
        pytest.param({1.5: 2}, TypeError, r"\{1\.5: 2\}", r"start must be an int.*got 1\.5", id="start 1.5"),
        pytest.param({None: 2}, TypeError, r"\{None: 2\}", "start must be an int.*got None", id="start None"),
        pytest.param({"--1": 2}, TypeError, r"\{'--1': 2\}", "start '--1' is not a number", id="start '--1'"),
        pytest.param({"²": 2}, TypeError, r"\{'²': 2\}", "start '²' is not a number", id="start a superscript"),
        pytest.param(
            {"gen": 2, "disc": 4},
            TypeError,
            r"\{'gen': 2, 'disc': 4\}",
            "no names here.*give `every`, in the order of `configure_optimizers`.*every=\\[1, 2\\]",
            id="names",
        ),
        pytest.param({1: 2, "1": 4}, ValueError, r"\{1: 2, '1': 4\}", "a start is given twice", id="start twice"),
    ],
)
def test_a_bad_schedule_is_refused_with_what_was_given_and_the_way_out(
    scheduling: Any, error: type[Exception], given: str, way_out: str
) -> None:
    with pytest.raises(error, match=rf"`AccumulationScheduler\(.*{given}.*\)`: .*{way_out}"):
        AccumulationScheduler(scheduling)


@pytest.mark.parametrize("interval", ["batch", "epochs", None, ["epoch"]])
def test_an_unknown_interval_is_refused_with_the_known_ones(interval: Any) -> None:
    with pytest.raises(
        ValueError, match=r"`AccumulationScheduler\(interval=.*\)`: accepted are 'epoch' and 'step' and 'sample'"
    ):
        AccumulationScheduler({0: 2}, interval=interval)


def test_errors_name_the_unit_of_the_starts() -> None:
    with pytest.raises(ValueError, match="accumulation factor from step 7 on must be an int >= 1, got 0"):
        AccumulationScheduler({7: 0}, interval="step")
    with pytest.raises(ValueError, match="steps count from 0"):
        AccumulationScheduler({-7: 2}, interval="step")


@pytest.mark.parametrize("given", [{5: 4}, {0: 2}, {"0": 1, "5": 4}], ids=str)
def test_the_users_dict_is_neither_changed_nor_kept(given: dict[Any, int]) -> None:
    before = dict(given)
    scheduler = AccumulationScheduler(given)
    assert given == before
    assert list(given) == list(before)
    schedule = scheduler.schedule
    given.clear()
    assert scheduler.scheduling == before
    assert scheduler.schedule == schedule


class Config(Mapping[Any, Any]):
    """As OmegaConf's DictConfig: a Mapping that is no dict."""

    def __init__(self, **pairs: Any) -> None:
        self._pairs = pairs

    def __getitem__(self, key: Any) -> Any:
        return self._pairs[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)


@pytest.mark.parametrize(
    "scheduling", [{"0": 1, "5": 4}, {" 5 ": 4}, {5: 4}, {5: 4, 0: 1}, Config(**{"0": 1, "5": 4}), Config(**{"5": 4})]
)
def test_every_spelling_of_a_schedule_means_the_same(scheduling: Any) -> None:
    scheduler = AccumulationScheduler(scheduling)
    assert scheduler.schedule == Schedule((0, 5), (1, 4))
    assert str(scheduler.schedule) == "1 from epoch 0, 4 from epoch 5"
    assert type(scheduler.scheduling) is dict


@pytest.mark.parametrize(("starts", "factors"), [((1,), (2,)), ((0, 3, 3), (1, 2, 3)), ((0, 4, 2), (1, 2, 3))])
def test_starts_that_do_not_ascend_from_0_make_no_schedule(starts: tuple[int, ...], factors: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="starts must ascend from 0"):
        Schedule(starts, factors)


@settings(deadline=None, derandomize=True)
@given(
    scheduling=st.dictionaries(st.integers(0, 12), st.integers(1, 9), min_size=1),
    interval=st.sampled_from(["epoch", "step"]),
)
def test_look_up_equals_a_walk_from_0(scheduling: dict[int, int], interval: Any) -> None:
    schedule = Schedule.parse(scheduling, interval)
    factor, walked = 1, []
    for position in range(15):
        factor = scheduling.get(position, factor)
        walked.append(factor)
    assert [schedule.factor_at(position) for position in range(15)] == walked
    by_epoch = interval == "epoch"
    assert [
        schedule.factor(epoch=i if by_epoch else 99, effective_step=99 if by_epoch else i, samples=99)
        for i in range(15)
    ] == walked
    assert schedule.largest_factor == max(walked)
    for position in range(15):
        later = [start for start in scheduling if start > position]
        assert schedule.next_start(position) == (min(later) if later else None)
