from __future__ import annotations

import functools
from dataclasses import FrozenInstanceError
from types import SimpleNamespace
from typing import Any

import pytest

from torchquorum import rules
from torchquorum.errors import ConfigError
from torchquorum.rules import Async, Bounded, Buffered, Local, Outer, Rule, Sync, parse_rule
from torchquorum.rules.presets import read_rule


def options(rule: Rule) -> tuple[Any, int | None, int | None, bool]:
    return rule.aggregate, rule.max_staleness, rule.max_lead, rule.pipeline


@pytest.mark.parametrize(
    ("rule", "aggregate", "max_staleness", "max_lead", "pipeline"),
    [
        (Async(), 1, None, None, False),
        (Async(pipeline=True), 1, None, None, True),
        (Sync(), None, 0, None, False),
        (Sync(aggregate=2), 2, 0, None, False),
        (Sync(2), 2, 0, None, False),
        (Bounded(3), 1, None, 3, False),
        (Bounded(0), 1, None, 0, False),
        (Buffered(4), 4, None, None, False),
    ],
    ids=str,
)
def test_a_preset_has_the_options_of_the_table(rule, aggregate, max_staleness, max_lead, pipeline):
    assert options(rule) == (aggregate, max_staleness, max_lead, pipeline)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (Async(), "Async()"),
        (Async(pipeline=True), "Async(pipeline=True)"),
        (Sync(), "Sync()"),
        (Sync(aggregate=2), "Sync(aggregate=2)"),
        (Bounded(3), "Bounded(3)"),
        (Buffered(4), "Buffered(4)"),
        (Sync("auto"), "Sync(aggregate='auto')"),
        (Sync("auto", floor=3, noise=2.5), "Sync(aggregate='auto', floor=3, noise=2.5)"),
        (Rule(aggregate=2, max_staleness=1, max_lead=3), "Rule(aggregate=2, max_staleness=1, max_lead=3)"),
    ],
)
def test_a_rule_is_shown_as_it_is_written(rule, text):
    assert str(rule) == text


def test_sync_needs_as_many_gradients_as_the_cluster_has_workers():
    assert [Sync().needed(n) for n in (1, 2, 7)] == [1, 2, 7]


def test_sync_of_a_cluster_without_workers_still_needs_a_gradient():
    assert Sync().needed(0) == 1


@pytest.mark.parametrize("num_workers", [1, 3, 9])
def test_a_given_aggregate_does_not_depend_on_the_number_of_workers(num_workers):
    assert Sync(aggregate=3).needed(num_workers) == 3
    assert Buffered(4).needed(num_workers) == 4
    assert Async().needed(num_workers) == Bounded(2).needed(num_workers) == 1


@pytest.mark.parametrize(
    ("rule", "once"), [(Async(), False), (Bounded(2), False), (Buffered(3), False), (Sync(), True), (Sync(2), True)]
)
def test_a_worker_counts_once_per_round_where_staleness_is_bounded(rule, once):
    assert rule.once_per_round is once
    assert Rule(aggregate=2, max_staleness=3).once_per_round


def test_rules_are_equal_by_value_and_frozen():
    rule = Sync(aggregate=2)
    assert rule == Sync(2) and hash(rule) == hash(Sync(2)) and rule != Sync()
    with pytest.raises(FrozenInstanceError):
        rule.aggregate = 3  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"aggregate": 0}, "aggregate=0: must be 1 or more; leave it out for all workers"),
        ({"aggregate": -2}, "aggregate=-2: must be 1 or more; leave it out for all workers"),
        ({"max_staleness": -1}, "max_staleness=-1: must be 0 or more; leave it out for no bound"),
        ({"max_lead": -1}, "max_lead=-1: must be 0 or more; leave it out for no bound"),
        ({"aggregate": 1.5}, "aggregate=1.5: must be a whole number, 1 or more; leave it out for all workers"),
        ({"max_staleness": "0"}, "max_staleness='0': must be a whole number, 0 or more; leave it out for no bound"),
        ({"max_lead": True}, "max_lead=True: must be a whole number, 0 or more; leave it out for no bound"),
    ],
)
def test_a_senseless_option_is_an_error_that_says_what_is_allowed(arguments: dict[str, Any], message):
    with pytest.raises(ConfigError) as error:
        Rule(**arguments)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("preset", "value", "message"),
    [
        (Sync, 0, "aggregate=0: must be 1 or more; leave it out for all workers"),
        (Bounded, -1, "max_lead=-1: must be 0 or more; for no bound use Async()"),
        (Bounded, None, "max_lead=None: must be a whole number, 0 or more; for no bound use Async()"),
        (Buffered, 0, "aggregate=0: must be 1 or more; for an update per gradient use Async()"),
        (Buffered, None, "aggregate=None: must be a whole number, 1 or more; for an update per gradient use Async()"),
        (Buffered, 2.0, "aggregate=2.0: must be a whole number, 1 or more; for an update per gradient use Async()"),
    ],
)
def test_a_preset_refuses_what_it_cannot_mean(preset, value, message):
    with pytest.raises(ConfigError) as error:
        preset(value)
    assert str(error.value) == message


def test_a_pipeline_with_bounded_staleness_is_an_error():
    with pytest.raises(ConfigError, match=r"pipeline=True with max_staleness=0: .*use Async\(pipeline=True\)"):
        Rule(max_staleness=0, pipeline=True)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("async", Async()),
        ("async:pipeline", Async(pipeline=True)),
        ("sync", Sync()),
        ("sync:2", Sync(2)),
        ("sync:2of3", Sync(2)),
        ("sync:auto", Sync("auto")),
        (" Sync : Auto : 3 ", Sync("auto", floor=3)),
        ("sync:3of3", Sync(3)),
        ("bounded:0", Bounded(0)),
        ("bounded:3", Bounded(3)),
        ("buffered:4", Buffered(4)),
        (" Sync : 2 of 3 ", Sync(2)),
        ("ASYNC", Async()),
        ("'sync'", Sync()),
        ('"bounded:3"', Bounded(3)),
    ],
)
def test_a_rule_is_read_as_the_command_line_writes_it(text, rule):
    assert parse_rule(text) == rule


@pytest.mark.parametrize(
    ("text", "near"),
    [("asinc", "async"), ("snyc", "sync"), ("bound:3", "bounded"), ("bufered:2", "buffered"), ("synch:2", "sync")],
)
def test_a_misspelt_rule_is_answered_with_the_nearest(text, near):
    with pytest.raises(ConfigError) as error:
        parse_rule(text)
    assert str(error.value).startswith(f"rule {text!r}: allowed are async, async:pipeline, sync,")
    assert str(error.value).endswith(f"; did you mean {near}?")


@pytest.mark.parametrize("text", ["", "hogwild", "bounded", "buffered", "bounded:", "async:3", "async:pipelined", ":2"])
def test_a_rule_that_is_like_no_other_gets_the_list_without_a_suggestion(text):
    with pytest.raises(ConfigError) as error:
        parse_rule(text)
    assert f"rule {text!r}: allowed are" in str(error.value)
    assert "did you mean" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("sync:two", "'two' is not a whole number"),
        ("sync:of3", "'' is not a whole number"),
        ("sync:2of", "'' is not a whole number"),
        ("sync:2ofmany", "'many' is not a whole number"),
        ("sync:4of3", "4 of 3 is more than all"),
        ("bounded:1.5", "'1.5' is not a whole number"),
        ("buffered:k", "'k' is not a whole number"),
        ("sync:0", "aggregate=0: must be 1 or more"),
        ("bounded:-1", "max_lead=-1: must be 0 or more"),
    ],
)
def test_a_rule_with_a_senseless_number_says_which(text, what):
    with pytest.raises(ConfigError) as error:
        parse_rule(text)
    assert what in str(error.value)


@pytest.mark.parametrize(("text", "example"), [("bounded", "bounded:3"), ("buffered:", "buffered:2")])
def test_a_rule_that_lacks_its_number_is_answered_with_an_example(text, example):
    with pytest.raises(ConfigError) as error:
        parse_rule(text)
    assert str(error.value).endswith(f"local:H:RULE; it needs a number, such as {example}")
    assert isinstance(parse_rule(example), Rule)


def test_a_rule_for_a_number_of_workers_is_for_that_number_where_it_is_known():
    assert parse_rule("sync:2of3", num_workers=3) == parse_rule("sync:2of3") == Sync(2)
    assert parse_rule("sync:2", num_workers=9) == Sync(2) and parse_rule("bounded:2", num_workers=9) == Bounded(2)
    for workers in (2, 4):
        with pytest.raises(
            ConfigError, match=f"rule 'sync:2of3': is for 3 workers, and there are {workers}; give as many"
        ):
            parse_rule("sync:2of3", num_workers=workers)
    with pytest.raises(ConfigError, match="'x' is not a whole number"):
        parse_rule("sync:2ofx", num_workers=3)
    with pytest.raises(ConfigError, match="allowed are"):
        parse_rule("async:2of3", num_workers=4)


def test_a_rule_without_options_is_async_under_another_name():
    assert options(Rule()) == options(Async())
    assert Rule().name == "Rule" and {Async().name, Sync().name} == {"Async", "Sync"}
    assert {Bounded(1).name, Buffered(1).name} == {"Bounded", "Buffered"}


def test_the_package_offers_the_rules_by_name():
    names = {name: getattr(rules, name) for name in rules.__all__}
    assert names.keys() == {"Async", "Bounded", "Buffered", "Local", "Outer", "Quorum", "Rule", "Sync", "parse_rule"}


# -- auto -------------------------------------------------------------------------------------------------------------


def test_auto_begins_with_all_and_never_goes_below_its_floor():
    assert Sync("auto").needed(7) == 7 and Sync("auto", floor=9).needed(7) == 9
    assert [Sync("auto").least(n) for n in (0, 1, 2, 3, 8)] == [1, 1, 1, 2, 4]
    assert Sync("auto", floor=3).least(8) == 3
    assert Sync(2).least(8) == 2 and Sync().least(8) == 8
    assert Sync("auto").auto and Sync("auto").once_per_round and not Sync().auto and not Sync(2).auto


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"aggregate": 2, "floor": 1}, "floor=1, noise=None: only aggregate='auto' chooses a number; leave them out"),
        ({"noise": 0.0}, "floor=None, noise=0.0: only aggregate='auto' chooses a number; leave them out"),
        ({"aggregate": "auto", "floor": 0}, "floor=0: must be 1 or more; leave it out for half of the workers"),
        ({"aggregate": "auto", "noise": -1.0}, "noise=-1.0: must be a number of gradients, 0 or more"),
        ({"aggregate": "auto", "noise": float("inf")}, "noise=inf: must be a number of gradients, 0 or more"),
        ({"aggregate": "auto", "noise": True}, "noise=True: must be a number of gradients, 0 or more"),
        ({"aggregate": "best"}, "aggregate='best': must be a whole number, 1 or more"),
    ],
)
def test_what_auto_cannot_mean_is_an_error(arguments: dict[str, Any], message):
    with pytest.raises(ConfigError) as error:
        Sync(**arguments)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("more", [{}, {"max_staleness": 1}, {"max_staleness": 0, "max_lead": 2}])
def test_auto_is_for_rounds_of_one_version(more: dict[str, Any]):
    with pytest.raises(ConfigError, match=r"use Sync\(aggregate='auto'\)"):
        Rule(aggregate="auto", **more)
    Rule(aggregate="auto", max_staleness=0)


SHOWN = [Async(), Async(pipeline=True), Sync(), Sync(2), Sync("auto", floor=3), Bounded(0), Buffered(4)]
SHOWN += [Local(50), *(Local(3, rule=rule) for rule in (Async(), Sync(2), Sync("auto"), Bounded(2), Buffered(4)))]


@pytest.mark.parametrize("rule", [*SHOWN, Sync("auto", noise=2.5), Sync("auto", noise=4)], ids=str)
def test_a_rule_is_read_as_it_is_shown(rule: Rule):
    assert read_rule(str(rule)) == rule


@pytest.mark.parametrize("rule", SHOWN, ids=str)
def test_a_preset_has_a_text_for_the_command_line(rule: Rule):
    assert parse_rule(rule.text) == rule


def test_what_is_no_preset_has_no_text_and_is_not_read():
    rule = Rule(aggregate=2, max_staleness=1)
    assert rule.text == str(rule)
    with pytest.raises(ConfigError, match="is no preset"):
        read_rule(str(rule))
    with pytest.raises(ConfigError, match="'x' is not a whole number"):
        parse_rule("sync:auto:x")
    with pytest.raises(ConfigError, match="'' is not a whole number"):
        parse_rule("sync:auto:")


# -- local steps ------------------------------------------------------------------------------------------------------


def test_local_steps_are_decided_on_by_another_rule():
    assert options(Local(5)) == options(Sync()) and Local(5).local_steps == 5 and Local(5).name == "Local"
    assert options(Local(5, rule=Async())) == options(Async())
    assert options(Local(5, aggregate=2)) == options(Sync(2))
    assert options(Local(5, aggregate=2, max_staleness=None)) == options(Buffered(2))
    assert options(Local(5, aggregate=1, max_staleness=None, max_lead=3)) == options(Bounded(3))
    assert Sync().local_steps is None and Sync().outer is None
    assert str(Local(5, aggregate=2, max_staleness=1)).endswith(
        ", rule=Rule(aggregate=2, max_staleness=1, max_lead=None))"
    )


def test_the_outer_optimizer_is_that_of_the_paper_unless_one_is_given():
    assert str(Local(5)) == "Local(5, outer=SGD(lr=0.7, momentum=0.9, nesterov=True))"
    assert Local(5, functools.partial(dict, lr=0.5)).outer == Outer("dict", (("lr", 0.5),))
    assert Local(5, Outer("Adam", ())).outer == Outer("Adam", ())
    optimizer = SimpleNamespace(defaults={"lr": 1, "eps": 0.1, "foreach": None}, param_groups=[{"lr": 0.3}])
    assert Local(5, optimizer).outer == Outer("SimpleNamespace", (("lr", 0.3), ("eps", 0.1)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "h=0: must be 1 or more; 1 gives every step"),
        ((True,), "h=True: must be a whole number"),
        ((5, 0.7), "Local(outer=0.7): give an optimizer of torch.optim over the model's parameters"),
        ((5, functools.partial(dict, [])), "Local(outer=functools.partial"),
        ((5, SimpleNamespace(defaults={}, param_groups=1)), "Local(outer=namespace"),
        (
            (5, SimpleNamespace(defaults={"lr": 1}, param_groups=[{"lr": 1}, {"lr": 2}])),
            "Local(outer=...): an outer optimizer",
        ),
    ],
)
def test_what_local_cannot_mean_is_an_error(arguments: Any, message: str):
    with pytest.raises(ConfigError) as error:
        Local(*arguments)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("more", [{"aggregate": 2}, {"max_staleness": None}, {"max_lead": 1}])
def test_local_takes_a_rule_or_its_options(more: dict[str, Any]):
    with pytest.raises(ConfigError, match="leave out aggregate, max_staleness, max_lead and grace"):
        Local(5, rule=Async(), **more)


@pytest.mark.parametrize("rule", [Async(pipeline=True), Local(2), "async"], ids=str)
def test_local_steps_go_with_rules_that_answer_every_gradient(rule: Any):
    with pytest.raises(ConfigError, match=r"give tq.Sync\(\), tq.Async\(\)"):
        Local(5, rule=rule)


def test_a_rule_with_local_steps_that_is_misspelt_is_refused():
    for text, what in [("local", "it needs a number, such as local:50"), ("local:x", "'x' is not a whole number")]:
        with pytest.raises(ConfigError, match=what):
            parse_rule(text)
    with pytest.raises(ConfigError, match="did you mean async"):
        parse_rule("local:5:asink")
    with pytest.raises(ConfigError, match="and there are 4"):
        parse_rule("local:5:sync:2of3", num_workers=4)
    with pytest.raises(ConfigError, match="is no preset"):
        read_rule("Local(5, outer=SGD(lr=0.7), rule=Unknown())")
