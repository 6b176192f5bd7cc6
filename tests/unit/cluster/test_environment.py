"""The clusters that other launchers describe by variables: which source wins, what it says, and what is refused."""

import json
import os

import pytest

from torchquorum.cluster.finding import Rendezvous
from torchquorum.cluster.program import read_program_flags
from torchquorum.cluster.slurm import expand_counts, expand_hosts
from torchquorum.cluster.sources import Resolved, resolve
from torchquorum.cluster.spec import ClusterSpec, TaskId
from torchquorum.errors import ClusterError

SPEC = {"ps": ["a:1"], "worker": ["b:1", "b:2"]}
SLURM = {
    "SLURM_JOB_ID": "42",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "0",
}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "3",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "3",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "r1",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch):
    ours = ("TORCHQUORUM_TASK", "TORCHQUORUM_PS", "TORCHQUORUM_PORT", "TF_CONFIG", "CLUSTER_SPEC", "ENVIRONMENT")
    for name in [
        *ours,
        *TORCHRUN,
        "JOB_NAME",
        "TASK_INDEX",
        "TASK_ID",
        *(n for n in os.environ if n.startswith("SLURM")),
    ]:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def set_all(monkeypatch):
    def put(*groups, **extra):
        for name, value in {k: v for group in [*groups, extra] for k, v in group.items()}.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    return put


def found(argv=(), **named) -> Resolved:
    resolved = resolve(list(argv), **named)
    assert resolved is not None
    return resolved


class TestSlurmsNotation:
    @pytest.mark.parametrize(
        ("text", "hosts"),
        [
            ("n1", "n1"),
            ("n[1-3,07-09],gpu-a[0-1]b", "n1 n2 n3 n07 n08 n09 gpu-a0b gpu-a1b"),
            ("r[1-2]n[01-02]", "r1n01 r1n02 r2n01 r2n02"),
            ("a,b-c.d,e[8-11]", "a b-c.d e8 e9 e10 e11"),
            ("n[098-101]", "n098 n099 n100 n101"),
        ],
    )
    def test_a_list_of_hosts_is_expanded(self, text, hosts):
        assert expand_hosts(text, label="X") == hosts.split()

    @pytest.mark.parametrize(
        "text", ["n[1-3", "n1-3]", "n[[1]]", "n[3-1]", "n[a-b]", "n[]", ",", "n[1-99999999]", "a,,b"]
    )
    def test_what_is_none_is_refused_with_the_variable_and_an_example(self, text):
        with pytest.raises(ClusterError, match=r"SLURM_STEP_NODELIST=.*: must be a list of hosts"):
            expand_hosts(text, label="SLURM_STEP_NODELIST")

    def test_tasks_per_node_are_expanded(self):
        assert expand_counts("2(x3),1", label="X") == [2, 2, 2, 1]
        with pytest.raises(ClusterError, match="X=2x3: must be the tasks of each node"):
            expand_counts("2x3", label="X")


class TestSlurm:
    def test_the_first_tasks_are_ps_and_the_next_is_the_chief(self, set_all):
        tasks = []
        for rank in range(4):
            set_all(SLURM, SLURM_PROCID=str(rank))
            tasks.append(str(found().task))
        assert tasks == ["/job:ps/task:0", "/job:worker/task:0", "/job:worker/task:1", "/job:worker/task:2"]
        addresses = [a for hosts in found().cluster.as_dict().values() for a in hosts]
        assert [a.partition(":")[0] for a in addresses] == ["n1", "n1", "n2", "n2"]
        assert found().source == "SLURM_*"
        assert found().why == "cluster from SLURM_* (job 42, 4 tasks: 1 ps, 3 workers)"

    def test_two_jobs_and_two_steps_on_one_host_have_different_ports(self, set_all):
        seen = set[str]()
        for job in range(100, 150):
            for step in range(3):
                set_all(SLURM, SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step))
                seen.add(found().cluster.as_dict()["ps"][0])
        assert len(seen) > 100
        set_all(SLURM, TORCHQUORUM_PORT="5000")
        assert found().cluster.as_dict() == {"ps": ["n1:5000"], "worker": ["n1:5001", "n2:5000", "n2:5001"]}

    def test_on_one_node_the_tasks_talk_over_loopback(self, set_all):
        set_all(SLURM, SLURM_STEP_NODELIST="n1", SLURM_STEP_TASKS_PER_NODE="4")
        assert {a.partition(":")[0] for a in found().cluster.as_dict()["worker"]} == {"127.0.0.1"}

    def test_tasks_dealt_out_in_turn_are_where_slurm_puts_them(self, set_all):
        set_all(SLURM, SLURM_DISTRIBUTION="cyclic", SLURM_PROCID="1", SLURM_LOCALID="0", SLURMD_NODENAME="n2")
        assert [a.partition(":")[0] for a in found().cluster.as_dict()["worker"]] == ["n2", "n1", "n2"]

    @pytest.mark.parametrize("how", ["flag", "variable"])
    def test_the_number_of_ps_can_be_given(self, set_all, how):
        set_all(SLURM, TORCHQUORUM_PS="2" if how == "variable" else None, SLURM_PROCID="2")
        resolved = found(["--ps", "2", "--lr=1"] if how == "flag" else ["--lr=1"])
        assert (resolved.task, resolved.cluster.num_tasks("ps")) == (TaskId("worker", 0), 2)
        assert resolved.remaining == ["--lr=1"]

    def test_a_batch_script_and_a_step_of_one_task_are_no_cluster(self, set_all):
        set_all(SLURM_PROCID="0", SLURM_NTASKS="4", SLURM_JOB_NODELIST="n[1-2]", ENVIRONMENT="BATCH")
        assert resolve([]) is None
        set_all(SLURM, SLURM_STEP_NUM_TASKS="1")
        assert resolve([]) is None

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"SLURM_PROCID": "4"}, "SLURM_PROCID=4: must be less than SLURM_STEP_NUM_TASKS=4"),
            ({"SLURM_PROCID": "x"}, "SLURM_PROCID=x: must be a whole number"),
            ({"SLURM_STEP_NODELIST": "n[1-3]"}, "SLURM_STEP_TASKS_PER_NODE=.* describes 2 nodes and .* has 3"),
            ({"SLURM_STEP_TASKS_PER_NODE": "2,1"}, "adds up to 3 tasks and SLURM_STEP_NUM_TASKS=4"),
            ({"SLURM_STEP_NODELIST": None}, "SLURM_STEP_NODELIST is not set"),
            ({"SLURM_STEP_TASKS_PER_NODE": None}, "SLURM_STEP_TASKS_PER_NODE is not set"),
            ({"SLURM_LOCALID": "1"}, "SLURM_LOCALID=1: must be 0 for SLURM_PROCID=0"),
            ({"SLURMD_NODENAME": "n2"}, "SLURMD_NODENAME=n2: must be n1"),
            ({"SLURM_DISTRIBUTION": "arbitrary"}, "SLURM_DISTRIBUTION=arbitrary: must be block or cyclic"),
            ({"TORCHQUORUM_PS": "4"}, "TORCHQUORUM_PS=4: must be from 1 to 3, because SLURM_STEP_NUM_TASKS=4"),
            ({"TORCHQUORUM_PS": "none"}, "TORCHQUORUM_PS=none: must be a whole number"),
            ({"TORCHQUORUM_PORT": "70000"}, "TORCHQUORUM_PORT=70000: must be a whole number from 1 to 65000"),
        ],
    )
    def test_broken_and_contradictory_variables_are_named(self, set_all, changed, message):
        set_all(SLURM, changed)
        with pytest.raises(ClusterError, match=message):
            resolve([])


class TestTorchrun:
    def test_the_addresses_are_exchanged_at_the_master(self, set_all):
        asked: list[Rendezvous] = []

        def exchange(rendezvous: Rendezvous) -> tuple[ClusterSpec, int]:
            asked.append(rendezvous)
            return ClusterSpec(SPEC), 7

        set_all(TORCHRUN)
        resolved = found(exchange=exchange)
        assert (resolved.task, resolved.cluster, resolved.listen_fd) == (TaskId("worker", 0), ClusterSpec(SPEC), 7)
        assert resolved.why == "cluster from torchrun (run r1, 3 tasks: 1 ps, 2 workers)"
        assert asked == [
            Rendezvous(
                host="localhost",
                port=29500,
                prefix="torchquorum/r1/2/",
                rank=1,
                size=3,
                num_ps=1,
                one_host=True,
                hosted=True,
            )
        ]

    def test_one_process_is_no_cluster(self, set_all):
        set_all(TORCHRUN, RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        assert resolve([]) is None

    def test_a_rank_of_another_program_alone_is_not_taken_for_torchrun(self, set_all):
        set_all(RANK="0")
        assert resolve([]) is None

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"RANK": "3"}, "RANK=3: must be less than WORLD_SIZE=3"),
            ({"RANK": None}, "RANK is not set"),
            ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two: must be a whole number"),
            ({"MASTER_ADDR": None}, "MASTER_ADDR is not set, and RANK=1 and WORLD_SIZE=3 are"),
            ({"MASTER_PORT": None}, "MASTER_PORT is not set"),
            ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999: must be a whole number from 1 to 65535"),
            ({"LOCAL_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE=4: must be at most WORLD_SIZE=3"),
            ({"TORCHQUORUM_PS": "3"}, "TORCHQUORUM_PS=3: must be from 1 to 2, because WORLD_SIZE=3"),
        ],
    )
    def test_broken_and_contradictory_variables_are_named(self, set_all, changed, message):
        set_all(TORCHRUN, changed)
        with pytest.raises(ClusterError, match=message):
            resolve([])


class TestClusterSpec:
    @pytest.mark.parametrize(
        "text",
        [
            json.dumps(SPEC),
            json.dumps({"cluster": SPEC}),
            str(SPEC),
            "ps|a:1,worker|b:1;b:2",
            json.dumps({"ps": "a:1", "worker": "b:1,b:2"}),
        ],
    )
    def test_it_is_read_in_the_forms_that_schedulers_write(self, set_all, text):
        set_all(CLUSTER_SPEC=text, JOB_NAME="worker", TASK_INDEX="1")
        assert (found().cluster, found().task, found().source) == (
            ClusterSpec(SPEC),
            TaskId("worker", 1),
            "CLUSTER_SPEC",
        )

    @pytest.mark.parametrize(("index", "number"), [("1", 1), ("worker-1", 1), ("my-job.x-worker-0", 0)])
    def test_an_index_may_be_the_name_of_a_pod(self, set_all, index, number):
        set_all(CLUSTER_SPEC=json.dumps(SPEC), JOB_NAME="worker", TASK_ID=index)
        assert found().task == TaskId("worker", number)

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"CLUSTER_SPEC": "{ps"}, "CLUSTER_SPEC={ps: must be JSON such as"),
            ({"CLUSTER_SPEC": "[1]"}, "CLUSTER_SPEC=.*: must be JSON"),
            ({"CLUSTER_SPEC": '{"ps": ["a:1"]}'}, "must have at least one worker"),
            ({"JOB_NAME": None}, "JOB_NAME is not: must be ps, worker"),
            ({"JOB_NAME": "wroker"}, "did you mean worker"),
            ({"TASK_INDEX": None}, "TASK_INDEX is not"),
            ({"TASK_INDEX": "two"}, "TASK_INDEX=two: must be a whole number"),
            ({"TASK_INDEX": "5"}, "task 5 of job 'worker'"),
            ({"TASK_ID": "0"}, "TASK_INDEX=1 and TASK_ID=0: must agree"),
        ],
    )
    def test_broken_and_contradictory_variables_are_named(self, set_all, changed, message):
        set_all({"CLUSTER_SPEC": json.dumps(SPEC), "JOB_NAME": "worker", "TASK_INDEX": "1"}, changed)
        with pytest.raises(ClusterError, match=message):
            resolve([])

    def test_a_job_name_without_it_is_somebody_elses(self, set_all):
        set_all(JOB_NAME="nightly", TASK_ID="7")
        assert resolve([]) is None


class TestWhoWins:
    TF = json.dumps({"cluster": SPEC, "task": {"type": "ps", "index": 0}})

    def test_a_source_that_names_every_task_wins_over_one_that_only_counts_them(self, set_all):
        set_all(SLURM, TORCHRUN, TF_CONFIG=self.TF)
        assert found().why == (
            "cluster from TF_CONFIG (3 tasks: 1 ps, 2 workers); torchrun and SLURM_* are set too and were not used, "
            "because TF_CONFIG names every task"
        )

    def test_torchrun_inside_a_job_of_slurm_is_nearer(self, set_all):
        set_all(SLURM, TORCHRUN)
        resolved = found(exchange=lambda _: (ClusterSpec(SPEC), 7))
        assert resolved.why.endswith("SLURM_* is set too and was not used, because torchrun started this process")

    def test_flags_win_and_the_line_says_what_was_passed_over(self, set_all):
        set_all(SLURM, SLURM_PROCID="broken, and not read")
        resolved = found(["--job_name=ps", "--task_id=0", "--ps_hosts=a:1", "--worker_hosts=b:1"])
        assert resolved.why == (
            "cluster from flags (2 tasks: 1 ps, 1 worker); SLURM_* is set too and was not used, "
            "because flags win over the environment"
        )

    def test_a_programs_own_flag_ps_stays_its_own_where_nobody_counts(self, set_all):
        set_all(TF_CONFIG=self.TF)
        assert found(["--ps", "3"]).remaining == ["--ps", "3"]

    def test_a_parser_that_declares_ps_keeps_it(self, set_all):
        import argparse

        from torchquorum.cluster.program import own_flags

        set_all(SLURM)
        parser = argparse.ArgumentParser()
        parser.add_argument("--ps", type=float, default=0.5)
        assert read_program_flags(parser, ["--ps", "0.25"])[0].ps == 0.25
        assert found(["--ps", "0.25"], own=own_flags(parser)).cluster.num_tasks("ps") == 1
