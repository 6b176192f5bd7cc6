import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchquorum.cluster.flags import ClusterFlags, check_transport, parse_flags
from torchquorum.errors import FlagError

WORKER_1 = ClusterFlags(job_name="worker", task_index=1, ps_hosts=("a:1",), worker_hosts=("b:1", "b:2"))


@pytest.mark.parametrize(
    "line",
    [
        "--job_name=worker --task_id=1 --ps_hosts=a:1 --worker_hosts=b:1,b:2",
        "--job_name worker --task_index 1 --ps_hosts a:1 --worker_hosts b:1,b:2",
        "-job-name=worker -task-index=1 -ps-hosts=a:1 -worker-hosts=b:1,b:2",
        "--job-name worker --task-id 1 --ps_host=a:1 --worker_host=b:1,b:2",
        "--job_name='worker' --task_index='1' --ps_hosts='a:1' --worker_hosts='b:1,b:2'",
        "--job_name=\u2018worker\u2019 --task_id=\u201c1\u201d --ps_hosts=\u201ea:1\u201c --worker_hosts=\u00abb:1,b:2",
        "--job_name=worker --task_index=**1** --ps_hosts=['a:1'] --worker_hosts=['b:1','b:2',]",
        "\u2014job_name=worker \u2013task_id=1 --ps_hosts=a:1, --worker_hosts=b:1,b:2,",
        # Spaces that no shell has kept together.
        "--job_name=worker --task_id=1 --ps_hosts=a: 1 --worker_hosts=b:1, b:2",
        "--job_name=worker --task_id=1 --ps_hosts='a: 1' --worker_hosts='b:1, b: 2'",
        "--job_name=worker --task_id=1 --ps_hosts 'a:1' --worker_hosts 'b:1', 'b:2'",
    ],
)
def test_every_way_to_write_the_flags_means_the_same(line):
    flags, remaining = parse_flags(line.split(" "))
    assert remaining == []
    assert (flags.job_name, flags.task_index) == ("worker", 1)
    assert [host.replace(" ", "") for host in flags.ps_hosts or ()] == ["a:1"]
    assert [host.replace(" ", "") for host in flags.worker_hosts or ()] == ["b:1", "b:2"]


def test_a_value_the_shell_kept_together_is_taken_whole():
    assert parse_flags(["--ps_hosts", "a: 1, b:2"])[0].ps_hosts == ("a: 1", "b:2")


def test_no_flags_give_nothing():
    assert parse_flags([]) == (ClusterFlags(), [])


def test_all_fields_are_filled():
    argv = ["--job_name=worker", "--task_id=1", "--ps_hosts=a:1", "--worker_hosts=b:1,b:2"]
    assert parse_flags(argv) == (WORKER_1, [])


def test_flags_of_the_program_are_left_in_order():
    argv = ["--lr", "0.1", "data.csv", "--job_name=ps", "-v", "--batch=3", "--task_index", "0", "-1", "--", "--job_nam"]
    flags, remaining = parse_flags(argv)
    assert (flags.job_name, flags.task_index) == ("ps", 0)
    assert remaining == ["--lr", "0.1", "data.csv", "-v", "--batch=3", "-1", "--", "--job_nam"]


def test_a_positional_argument_after_a_last_comma_is_not_a_host():
    flags, remaining = parse_flags(["--ps_hosts=a:1,", "data.csv"])
    assert flags.ps_hosts == ("a:1",)
    assert remaining == ["data.csv"]


@pytest.mark.parametrize(
    ("token", "meant"),
    [
        ("--job_nam=ps", "--job_name"),
        ("--job-nam", "--job_name"),
        ("--jobname=ps", "--job_name"),
        ("--Job_Name=ps", "--job_name"),
        ("--taske_id=0", "--task_id"),
        ("-task_ids=0", "--task_id"),
        ("--taskid=0", "--task_id"),
        ("--task-indx=0", "--task_index"),
        ("--worker_hots=a:1", "--worker_hosts"),
        ("--workers_hosts", "--worker_hosts"),
        ("--ps_hots=a:1", "--ps_hosts"),
        ("--trasport=tcp", "--transport"),
    ],
)
def test_a_misspelt_flag_is_an_error_with_a_suggestion(token, meant):
    with pytest.raises(FlagError) as caught:
        parse_flags(["--lr=1", token])
    assert f"did you mean {meant}?" in str(caught.value)
    assert str(caught.value).startswith(token.partition("=")[0] + ":")


@pytest.mark.parametrize(
    "token", ["--workers=2", "--ps=1", "--job", "--task=mnist", "--hosts=a", "-t", "--transform=x"]
)
def test_a_flag_that_only_shares_a_word_is_the_programs_own(token):
    assert parse_flags([token]) == (ClusterFlags(), [token])


@pytest.mark.parametrize("text", ["abc", "1.5", "-1", "1x", "0x1", "\u0661"])
@pytest.mark.parametrize("name", ["task_id", "task_index"])
def test_an_index_that_is_no_number_says_what_came_and_what_is_allowed(name, text):
    with pytest.raises(FlagError, match="must be a whole number, 0 or more") as caught:
        parse_flags([f"--{name}", text])
    assert f"--{name}={text}:" in str(caught.value)


@pytest.mark.parametrize(
    ("argv", "both"),
    [
        (["--task_id=0", "--task_index=1"], ["--task_id=0", "--task_index=1"]),
        (["--job_name=ps", "--job-name", "worker"], ["--job_name=ps", "--job_name=worker"]),
        (["--ps_hosts=a:1", "--ps_host=a:2"], ["--ps_hosts=a:1", "--ps_host=a:2"]),
    ],
)
def test_two_values_for_one_thing_are_an_error_that_shows_both(argv, both):
    with pytest.raises(FlagError, match="keep one of them") as caught:
        parse_flags(argv)
    assert all(given in str(caught.value) for given in both)


def test_the_same_value_twice_is_fine():
    flags, _ = parse_flags(["--task_id=1", "--task_index=01", "--job_name='ps'", "--job_name=ps"])
    assert (flags.job_name, flags.task_index) == ("ps", 1)


@pytest.mark.parametrize(
    "argv",
    [
        ["--job_name"],
        ["--job_name="],
        ["--job_name=''"],
        ["--job_name", "--task_id=0"],
        ["--job_name", "--", "ps"],
        ["--task_id"],
        ["--ps_hosts", "-v"],
        ["--ps_hosts=,"],
        ["--transport"],
    ],
)
def test_a_flag_without_its_value_is_an_error_with_an_example(argv):
    with pytest.raises(FlagError, match="write for example --"):
        parse_flags(argv)


def test_two_commas_in_a_row_are_an_error():
    with pytest.raises(FlagError, match="--worker_hosts=a:1,,b:1: .*one comma"):
        parse_flags(["--worker_hosts=a:1,,b:1"])


@pytest.mark.parametrize("transport", ["auto", "shm", "tcp", "'tcp'"])
def test_a_known_transport_is_taken(transport):
    assert parse_flags([f"--transport={transport}"])[0].transport == transport.strip("'")


def test_an_unknown_transport_is_an_error_that_lists_the_known():
    with pytest.raises(FlagError, match="--transport=udp: must be one of auto, shm, tcp"):
        parse_flags(["--transport=udp"])
    with pytest.raises(FlagError, match="MY_VARIABLE=tcpp: .*did you mean tcp"):
        check_transport("tcpp", label="MY_VARIABLE")


@given(st.lists(st.text(max_size=12), max_size=6))
def test_any_arguments_are_understood_left_alone_or_a_flag_error(argv):
    try:
        _, remaining = parse_flags(argv)
    except FlagError:
        return
    waiting = iter(argv)
    assert all(token in waiting for token in remaining)
