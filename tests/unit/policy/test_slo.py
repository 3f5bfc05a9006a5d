"""An SLO read from text and written as text."""

import pytest

from hadal.policy.slo import MEAN, Slo, parse_slo


def test_units_and_percentiles() -> None:
    assert parse_slo("ttft=2s,tpot=50ms") == Slo(2.0, 0.05, MEAN, MEAN)
    assert parse_slo(" TPOT = 0.04s , ttft_p99=2500ms") == Slo(2.5, 0.04, 0.99, MEAN)
    assert parse_slo("ttft_p50=1s,tpot_p99.9=60ms").tpot_quantile == pytest.approx(0.999)


def test_it_says_what_it_is() -> None:
    assert str(parse_slo("ttft_p99=2s,tpot=50ms")) == "TTFT p99 2 s, mean TPOT 50 ms"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("ttft=2s", "tpot has no limit"),
        ("", "is not an SLO"),
        ("ttft=2s,tpot=50", "needs the unit s or ms"),
        ("ttft=2s,tpot=50us", "needs the unit s or ms"),
        ("ttft=2s,e2e=9s,tpot=1s", "'e2e' is not a quantity of an SLO"),
        ("ttft=2s,ttft=3s,tpot=1s", "twice"),
        ("ttft=0s,tpot=50ms", "above 0"),
        ("ttft=1.2.3s,tpot=50ms", "not a number"),
        ("ttft_p100=2s,tpot=50ms", "between 0 and 100"),
        ("ttft_p0=2s,tpot=50ms", "between 0 and 100"),
    ],
)
def test_what_is_no_promise_is_said(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_slo(text)
