import json

import pytest

from torchquorum import env
from torchquorum.cluster.sources import Resolved, TaskArguments, launcher_task, resolve
from torchquorum.cluster.spec import ClusterSpec, TaskId
from torchquorum.errors import ClusterError, ConfigError, FlagError

CLUSTER = {"ps": ["a:1"], "worker": ["b:1", "b:2"]}
OTHER = {"ps": ["x:1"], "worker": ["y:1", "y:2", "y:3"]}
FLAGS = ["--job_name=worker", "--task_index=1", "--ps_hosts=a:1", "--worker_hosts=b:1,b:2"]


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch):
    for name in (env.TASK, env.TF_CONFIG, env.TRANSPORT, env.CLUSTER_SPEC, "RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def set_launcher(monkeypatch):
    def put(cluster=OTHER, job="worker", index=2, transport="auto", listen_fd: int | None = 5):
        text = launcher_task(ClusterSpec(cluster), TaskId(job, index), transport, listen_fd)
        monkeypatch.setenv(env.TASK, text)

    return put


@pytest.fixture
def set_tf_config(monkeypatch):
    def put(config):
        monkeypatch.setenv(env.TF_CONFIG, config if isinstance(config, str) else json.dumps(config))

    return put


def tf_config(cluster=OTHER, job="worker", index: object = 0):
    return {"cluster": cluster, "task": {"type": job, "index": index}}


def found(argv=None, *, defaults=None, **arguments) -> Resolved:
    resolved = resolve(argv, TaskArguments(**arguments), defaults=defaults)
    assert resolved is not None
    return resolved


class TestOrder:
    def test_nothing_given_is_none(self):
        assert resolve([]) is None
        assert resolve(["--lr=1", "--transport=tcp"]) is None

    def test_flags_are_taken_and_the_rest_is_kept(self):
        resolved = found(["--lr", "1", *FLAGS, "data.csv"])
        assert resolved == Resolved(
            cluster=ClusterSpec(CLUSTER),
            task=TaskId("worker", 1),
            transport="auto",
            source="flags",
            remaining=["--lr", "1", "data.csv"],
            listen_fd=None,
        )

    def test_no_argv_means_the_arguments_of_the_process(self, monkeypatch):
        monkeypatch.setattr("sys.argv", ["train.py", *FLAGS, "--lr=1"])
        resolved = found()
        assert (resolved.task, resolved.remaining) == (TaskId("worker", 1), ["--lr=1"])

    def test_arguments_win_over_flags(self):
        resolved = found(FLAGS, cluster=OTHER, job_name="ps", task_index=0)
        assert (resolved.cluster, resolved.task) == (ClusterSpec(OTHER), TaskId("ps", 0))
        assert resolved.source == "arguments"
        assert resolved.remaining == []

    def test_a_cluster_spec_is_taken_as_it_is(self):
        spec = ClusterSpec(CLUSTER)
        assert found([], cluster=spec, job_name="ps", task_index=0).cluster is spec

    def test_a_cluster_of_the_program_and_a_task_of_the_flags_go_together(self):
        resolved = found(["--job_name=worker", "--task_id=2"], cluster=OTHER)
        assert (resolved.task, resolved.source) == (TaskId("worker", 2), "arguments and flags")

    def test_flags_win_over_the_launcher(self, set_launcher):
        set_launcher()
        resolved = found(FLAGS)
        assert (resolved.cluster, resolved.source, resolved.listen_fd) == (ClusterSpec(CLUSTER), "flags", None)

    def test_the_launcher_wins_over_tf_config(self, set_launcher, set_tf_config):
        set_launcher()
        set_tf_config(tf_config(CLUSTER))
        resolved = found(["--lr=1"])
        assert (resolved.cluster, resolved.task) == (ClusterSpec(OTHER), TaskId("worker", 2))
        assert (resolved.source, resolved.listen_fd, resolved.remaining) == ("launcher", 5, ["--lr=1"])

    def test_tf_config_is_taken_where_nothing_else_is_given(self, set_tf_config):
        set_tf_config(tf_config())
        resolved = found([])
        assert (resolved.task, resolved.source, resolved.listen_fd) == (TaskId("worker", 0), "TF_CONFIG", None)

    def test_a_source_that_is_not_needed_is_not_read(self, set_tf_config, set_launcher):
        set_tf_config("{broken")
        assert found(FLAGS).source == "flags"
        set_launcher()
        assert found([]).source == "launcher"

    def test_a_task_of_the_flags_in_a_cluster_of_tf_config(self, set_tf_config):
        set_tf_config(tf_config())
        resolved = found(["--job_name=worker", "--task_index=2"])
        assert (resolved.task, resolved.source) == (TaskId("worker", 2), "TF_CONFIG and flags")

    def test_the_launchers_socket_is_not_used_for_another_task(self, set_launcher):
        set_launcher()
        assert found(["--job_name=worker", "--task_index=1"]).listen_fd is None
        assert found([]).listen_fd == 5

    def test_a_task_outside_the_cluster_is_refused(self):
        with pytest.raises(ClusterError, match="task 5 of job 'worker'"):
            resolve([*FLAGS[2:], "--job_name=worker", "--task_id=5"])
        with pytest.raises(ClusterError, match="did you mean ps"):
            resolve([*FLAGS[2:], "--job_name=pss", "--task_id=0"])

    def test_an_index_of_the_program_must_be_whole(self):
        with pytest.raises(ClusterError, match="task_index='1'"):
            resolve([], TaskArguments(cluster=CLUSTER, job_name="worker", task_index="1"))  # pyright: ignore[reportArgumentType]


class TestHalfDescribed:
    @pytest.mark.parametrize(
        ("argv", "missing"),
        [
            (["--job_name=ps"], ["task_index", "ps_hosts", "worker_hosts"]),
            (["--job_name=ps", "--task_id=0"], ["ps_hosts", "worker_hosts"]),
            (["--ps_hosts=a:1"], ["job_name", "task_index", "worker_hosts"]),
            (FLAGS[2:], ["job_name", "task_index"]),
            (FLAGS[:3], ["worker_hosts"]),
            (FLAGS[1:], ["job_name"]),
            ([FLAGS[0], *FLAGS[2:]], ["task_index"]),
        ],
    )
    def test_flags_in_part_are_an_error_with_what_is_missing_and_an_example(self, argv, missing):
        with pytest.raises(FlagError) as caught:
            resolve(argv)
        listed = " ".join(f"--{name}" for name in missing)
        assert f" without {listed}: " in str(caught.value)
        assert "write for example --job_name=worker --task_index=0 --ps_hosts=" in str(caught.value)

    def test_a_cluster_of_the_program_without_a_task_is_an_error(self):
        with pytest.raises(FlagError, match="without --job_name --task_index"):
            resolve([], TaskArguments(cluster=CLUSTER))

    def test_half_a_task_is_not_completed_by_another_source(self, set_tf_config):
        set_tf_config(tf_config())
        with pytest.raises(FlagError, match="without --task_index"):
            resolve(["--job_name=ps"])

    def test_half_a_cluster_is_not_completed_by_another_source(self, set_tf_config):
        set_tf_config(tf_config())
        with pytest.raises(FlagError, match="without --worker_hosts"):
            resolve(["--ps_hosts=a:1"])


class TestTransport:
    def test_it_is_taken_from_the_first_that_chooses(self, monkeypatch, set_launcher):
        assert found(FLAGS).transport == "auto"
        monkeypatch.setenv(env.TRANSPORT, "tcp")
        assert found(FLAGS).transport == "tcp"
        set_launcher()
        assert found([]).transport == "tcp"
        set_launcher(transport="shm")
        assert found([]).transport == "shm"
        assert found(["--transport=tcp"]).transport == "tcp"
        assert found(["--transport=tcp"], transport="auto").transport == "auto"

    def test_an_unknown_one_says_where_it_came_from(self, monkeypatch):
        with pytest.raises(FlagError, match="transport=udp: must be one of"):
            resolve(FLAGS, TaskArguments(transport="udp"))
        monkeypatch.setenv(env.TRANSPORT, "udp")
        with pytest.raises(FlagError, match="TORCHQUORUM_TRANSPORT=udp: must be one of"):
            resolve(FLAGS)


class TestLauncher:
    def test_the_text_is_the_agreed_json(self):
        text = launcher_task(ClusterSpec(CLUSTER), TaskId("worker", 0), "auto", 5)
        assert json.loads(text) == {
            "cluster": CLUSTER,
            "job": "worker",
            "index": 0,
            "transport": "auto",
            "listen_fd": 5,
        }
        assert json.loads(launcher_task(ClusterSpec(CLUSTER), TaskId("ps", 0)))["listen_fd"] is None

    def test_a_task_outside_the_cluster_is_refused(self):
        with pytest.raises(ClusterError, match="task 1 of job 'ps'"):
            launcher_task(ClusterSpec(CLUSTER), TaskId("ps", 1))

    def test_a_chief_is_passed_on_as_worker_0(self, set_launcher):
        set_launcher(cluster={"chief": ["c:1"], **CLUSTER}, index=0)
        assert found([]).task == TaskId("worker", 0)
        assert found([]).cluster.as_dict()["worker"] == ["c:1", "b:1", "b:2"]

    @pytest.mark.parametrize("text", ["{", "[]", "{}", '{"cluster": {}, "job": "ps", "index": "x"}'])
    def test_a_malformed_text_says_to_unset_it(self, monkeypatch, text):
        monkeypatch.setenv(env.TASK, text)
        with pytest.raises(ClusterError, match="unset TORCHQUORUM_TASK") as caught:
            resolve([])
        assert text in str(caught.value)


class TestTfConfig:
    @pytest.mark.parametrize("job", ["chief", "master"])
    def test_a_chief_becomes_worker_0_and_shifts_the_workers(self, set_tf_config, job):
        cluster = {job: ["c:1"], **CLUSTER}
        set_tf_config(tf_config(cluster, job, 0))
        assert found([]).task == TaskId("worker", 0)
        set_tf_config(tf_config(cluster, "worker", 1))
        assert found([]).task == TaskId("worker", 2)
        assert found([]).cluster.num_tasks("worker") == 3

    @pytest.mark.parametrize("cluster", [CLUSTER, {**CLUSTER, "evaluator": ["e:1"]}])
    def test_an_evaluator_stands_outside_of_the_cluster_whether_it_is_listed_or_not(self, set_tf_config, cluster):
        set_tf_config(tf_config(cluster, "evaluator", 0))
        assert (found([]).task, found([]).cluster) == (TaskId("evaluator", 0), ClusterSpec(CLUSTER))
        set_tf_config(tf_config(cluster, "evaluator", 1))
        with pytest.raises(ClusterError, match="there is one evaluator"):
            resolve([])

    def test_an_index_may_be_a_text(self, set_tf_config):
        set_tf_config(tf_config(index="1"))
        assert found([]).task == TaskId("worker", 1)

    def test_quotes_around_the_whole_are_forgiven(self, set_tf_config):
        set_tf_config(f"'{json.dumps(tf_config())}'")
        assert found([]).source == "TF_CONFIG"

    @pytest.mark.parametrize("text", ["", "  ", "{}"])
    def test_an_empty_one_is_none(self, set_tf_config, text):
        set_tf_config(text)
        assert resolve([]) is None

    def test_one_without_a_ps_is_refused(self, set_tf_config):
        set_tf_config(tf_config({"worker": ["b:1"]}))
        with pytest.raises(ClusterError, match="cluster with worker: must have at least one ps"):
            resolve([])

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ("{'cluster': 1}", "not JSON near .*'cluster'.*double quotes"),
            ('{"cluster": {"ps": ["a:1"],}}', "not JSON near"),
            ("[]", r"TF_CONFIG is \[\] and has no 'cluster'"),
            ({"task": {"type": "ps", "index": 0}}, "TF_CONFIG is .*has no 'cluster'"),
            ({"cluster": CLUSTER}, "TF_CONFIG is .*has no 'task'"),
            ({"cluster": ["a:1"], "task": {}}, r"TF_CONFIG\['cluster'\] is \[\"a:1\"\]: must be an object"),
            ({"cluster": CLUSTER, "task": {"index": 0}}, r"TF_CONFIG\[\"task\"\] is {\"index\": 0} and has no 'type'"),
            ({"cluster": CLUSTER, "task": {"type": "ps"}}, "has no 'index'"),
            (tf_config(index="x"), r"\['index'\] is \"x\": must be a whole number"),
            (tf_config(index=True), r"\['index'\] is true: must be a whole number"),
        ],
    )
    def test_a_malformed_one_quotes_the_part_and_shows_the_shape(self, set_tf_config, config, message):
        set_tf_config(config)
        with pytest.raises(ClusterError, match=message) as caught:
            resolve([])
        assert '{"cluster": {"ps": ["host0:2222"]' in str(caught.value)

    def test_a_wrong_address_in_it_is_a_cluster_error(self, set_tf_config):
        set_tf_config(tf_config({"ps": ["a"], "worker": ["b:1"]}))
        with pytest.raises(ClusterError, match="address 'a' of /job:ps/task:0"):
            resolve([])


class TestEnvironment:
    def test_a_blank_variable_counts_as_not_set(self, monkeypatch):
        monkeypatch.setenv(env.REPORT, " ")
        assert env.report() is None
        monkeypatch.setenv(env.REPORT, "r.json")
        assert env.report() == "r.json"

    def test_the_launchers_start_is_a_number(self, monkeypatch):
        monkeypatch.delenv(env.STARTED_AT, raising=False)
        assert env.started_at() is None
        monkeypatch.setenv(env.STARTED_AT, "12.5")
        assert env.started_at() == 12.5
        monkeypatch.setenv(env.STARTED_AT, "noon")
        with pytest.raises(ConfigError, match="TORCHQUORUM_STARTED_AT='noon'"):
            env.started_at()

    def test_a_childs_environment_is_a_copy_with_extras(self, monkeypatch):
        monkeypatch.setenv(env.LOGDIR, "runs/a")
        monkeypatch.delenv(env.OMP_NUM_THREADS, raising=False)
        child = env.child_environment(TORCHQUORUM_LOGDIR=None, OMP_NUM_THREADS="1")
        assert env.LOGDIR not in child
        assert child[env.OMP_NUM_THREADS] == "1"
        assert "PATH" in child
        assert env.logdir() == "runs/a"
        assert not env.has_omp_num_threads()
