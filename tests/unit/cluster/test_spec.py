import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchquorum.cluster.spec import ClusterSpec, TaskId, parse_address, split_addresses
from torchquorum.errors import ClusterError

PLAIN = {"ps": ["a:1"], "worker": ["b:1", "b:2"]}


def clean(text: str) -> str:
    return parse_address(text, label="/job:ps/task:0")


class TestTaskId:
    def test_its_text_is_its_name(self):
        assert str(TaskId("ps", 0)) == "/job:ps/task:0"

    @pytest.mark.parametrize(
        "name", ["/job:worker/task:1", "/job:worker/replica:0/task:1", "job:worker/task:1", "'/job:worker/task:1' "]
    )
    def test_a_name_is_parsed(self, name):
        assert TaskId.parse(name) == TaskId(job="worker", index=1)

    @pytest.mark.parametrize(
        "name", ["", "worker:1", "/job:worker", "/job:worker/task:x", "/job:worker/task:-1", "/task:1"]
    )
    def test_another_text_is_refused_and_shown(self, name):
        with pytest.raises(ClusterError) as caught:
            TaskId.parse(name)
        assert repr(name) in str(caught.value)
        assert "/job:worker/task:1" in str(caught.value)

    def test_a_negative_index_is_refused(self):
        with pytest.raises(ClusterError, match="-1.*0 or more"):
            TaskId("worker", -1)

    @given(st.sampled_from(["ps", "worker"]), st.integers(0, 10**6))
    def test_name_and_task_are_inverse(self, job, index):
        task = TaskId(job, index)
        assert TaskId.parse(str(task)) == task

    def test_the_chief_is_worker_0(self):
        assert TaskId("worker", 0).is_chief
        assert not TaskId("worker", 1).is_chief
        assert not TaskId("ps", 0).is_chief


class TestTasks:
    def test_jobs_tasks_and_addresses_are_as_given(self):
        spec = ClusterSpec(PLAIN)
        assert spec.jobs == ("ps", "worker")
        assert spec.num_tasks("worker") == 2
        assert spec.tasks("worker") == spec.workers == (TaskId("worker", 0), TaskId("worker", 1))
        assert spec.ps == (TaskId("ps", 0),)
        assert spec.address(TaskId("worker", 1)) == "b:2"

    def test_a_job_may_map_indices_to_addresses(self):
        assert ClusterSpec({"ps": {0: "a:1"}, "worker": {"1": "b:2", "0": "b:1"}}) == ClusterSpec(PLAIN)

    def test_a_job_may_be_one_text(self):
        assert ClusterSpec({"ps": "a:1", "worker": "b:1, b:2"}) == ClusterSpec(PLAIN)

    def test_a_list_may_hold_the_whole_text(self):
        assert ClusterSpec({"ps": ["a:1"], "worker": ["b:1,b:2"]}) == ClusterSpec(PLAIN)

    def test_quotes_around_job_names_are_forgiven(self):
        assert ClusterSpec({"'ps'": ["a:1"], "\u201cworker\u201d": ["b:1", "b:2"]}) == ClusterSpec(PLAIN)

    def test_a_dict_of_it_gives_the_same_cluster(self):
        spec = ClusterSpec({"chief": ["c:1"], "ps": ["a:1"], "worker": ["b:1"]})
        assert ClusterSpec(spec.as_dict()) == spec
        assert hash(ClusterSpec(spec.as_dict())) == hash(spec)

    def test_its_dict_is_a_copy(self):
        spec = ClusterSpec(PLAIN)
        spec.as_dict()["ps"].append("z:9")
        assert spec.as_dict() == PLAIN

    def test_different_clusters_differ(self):
        assert ClusterSpec(PLAIN) != ClusterSpec({"ps": ["a:1"], "worker": ["b:1"]})
        assert ClusterSpec(PLAIN) != PLAIN

    def test_its_representation_shows_every_task(self):
        assert repr(ClusterSpec(PLAIN)) == f"ClusterSpec({PLAIN!r})"


class TestChief:
    @pytest.mark.parametrize("job", ["chief", "master"])
    def test_a_chief_job_becomes_worker_0_and_shifts_the_workers(self, job):
        spec = ClusterSpec({job: ["c:1"], "ps": ["a:1"], "worker": ["b:1", "b:2"]})
        assert spec.as_dict()["worker"] == ["c:1", "b:1", "b:2"]
        assert spec.find_task(job, 0) == TaskId("worker", 0)
        assert spec.find_task("worker", 0) == TaskId("worker", 1)
        assert spec.find_task("worker", 1) == TaskId("worker", 2)
        assert spec.find_task("ps", 0) == TaskId("ps", 0)

    def test_a_chief_alone_is_a_worker(self):
        spec = ClusterSpec({"chief": ["c:1"], "ps": ["a:1"]})
        assert spec.workers == (TaskId("worker", 0),)
        with pytest.raises(ClusterError, match="task 0 of job 'worker'.*'chief'"):
            spec.find_task("worker", 0)

    def test_the_last_worker_index_is_the_one_that_was_given(self):
        with pytest.raises(ClusterError, match="task 2 of job 'worker': the job has 2 tasks, index 0 to 1"):
            ClusterSpec({"chief": ["c:1"], **PLAIN}).find_task("worker", 2)

    def test_two_chiefs_are_refused(self):
        with pytest.raises(ClusterError, match="'chief' with 2 tasks"):
            ClusterSpec({"chief": ["c:1", "c:2"], **PLAIN})

    def test_chief_and_master_together_are_refused(self):
        with pytest.raises(ClusterError, match="'chief' and 'master'"):
            ClusterSpec({"chief": ["c:1"], "master": ["c:2"], **PLAIN})

    def test_a_second_chief_index_is_refused(self):
        with pytest.raises(ClusterError, match="task 1 of job 'chief'.*one task, index 0"):
            ClusterSpec({"chief": ["c:1"], **PLAIN}).find_task("chief", 1)

    def test_asking_for_a_chief_where_there_is_none_points_to_worker_0(self):
        with pytest.raises(ClusterError, match="the chief is worker 0"):
            ClusterSpec(PLAIN).find_task("chief", 0)

    def test_an_evaluator_is_left_out(self):
        spec = ClusterSpec({**PLAIN, "evaluator": ["e:1"]})
        assert spec == ClusterSpec(PLAIN)
        assert spec.find_task("evaluator", 0) == TaskId("evaluator", 0)
        with pytest.raises(ClusterError, match="job 'evaluator'"):
            spec.check_task(TaskId("evaluator", 0))


class TestWrongTask:
    def test_a_misspelt_job_gets_a_suggestion(self):
        with pytest.raises(ClusterError, match="'pss'.*ps and worker; did you mean ps"):
            ClusterSpec(PLAIN).find_task("pss", 0)

    def test_quotes_around_the_job_are_forgiven(self):
        assert ClusterSpec(PLAIN).find_task("'ps'", 0) == TaskId("ps", 0)

    @pytest.mark.parametrize("index", [2, 5])
    def test_an_index_out_of_range_says_which_exist(self, index):
        spec = ClusterSpec(PLAIN)
        for refuse in (spec.check_task, spec.address):
            with pytest.raises(ClusterError, match=f"task {index} of job 'worker'.*2 tasks, index 0 to 1.*add"):
                refuse(TaskId("worker", index))
        with pytest.raises(ClusterError, match=f"task {index} of job 'worker'"):
            spec.find_task("worker", index)

    def test_a_negative_index_is_out_of_range(self):
        with pytest.raises(ClusterError, match="task -1 of job 'ps'.*one task, index 0"):
            ClusterSpec(PLAIN).find_task("ps", -1)

    def test_an_unknown_job_has_no_tasks(self):
        with pytest.raises(ClusterError, match="'trainer'"):
            ClusterSpec(PLAIN).num_tasks("trainer")


class TestWrongCluster:
    @pytest.mark.parametrize(
        ("cluster", "message"),
        [
            ({**PLAIN, "workers": ["c:1"]}, "'workers'.*did you mean worker"),
            ({**PLAIN, "zzz": ["c:1"]}, "'zzz'.*ps, worker, chief, master and evaluator"),
            ({"ps": [], "worker": ["b:1"]}, "'ps' with no address.*at least one"),
            ({"ps": "", "worker": ["b:1"]}, "'ps' with no address"),
            ({"worker": ["b:1"]}, "cluster with worker: must have at least one ps.*add"),
            ({"ps": ["a:1"]}, "cluster with ps: must have at least one worker.*add"),
            ({}, "without any task.*at least one ps"),
            ({"ps": ["a:1"], "worker": {0: "b:1", 2: "b:2"}}, r"indices \[0, 2\].*without gaps.*all 3"),
            ({"ps": ["a:1"], "worker": {"x": "b:1"}}, "index 'x' of job 'worker'"),
            ({"ps": ["a:1"], "worker": {0: "b:1", "0": "b:2"}}, "index 0 of job 'worker': given twice"),
            ({"ps": ["a:1"], "worker": [2223]}, "address 2223 of /job:worker/task:0"),
            ({"ps": ["a:1"], "worker": ["b:1", ""]}, "address '' of /job:worker/task:1"),
            ({"ps": ["a:1"], "worker": 3}, "'worker' with 3: must be a list"),
            ({"ps": ["a:1"], "'ps'": ["a:2"], "worker": ["b:1"]}, "'ps': given twice"),
            (["a:1"], "must be a dict"),
        ],
    )
    def test_it_is_refused_with_what_came_and_what_is_allowed(self, cluster, message):
        with pytest.raises(ClusterError, match=message):
            ClusterSpec(cluster)

    @pytest.mark.parametrize(
        ("cluster", "tasks"),
        [
            ({"ps": ["a:1"], "worker": ["b:1", "b:1"]}, ["/job:worker/task:0", "/job:worker/task:1"]),
            ({"ps": ["a:1"], "worker": ["b:1", "A:1"]}, ["/job:ps/task:0", "/job:worker/task:1"]),
            ({"chief": ["c:1"], "ps": ["a:1"], "worker": ["grpc://c: 1"]}, ["/job:chief/task:0", "/job:worker/task:0"]),
        ],
    )
    def test_a_duplicate_address_names_both_tasks(self, cluster, tasks):
        with pytest.raises(ClusterError, match="its own") as caught:
            ClusterSpec(cluster)
        assert all(task in str(caught.value) for task in tasks)


class TestAddress:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("localhost:2222", "localhost:2222"),
            (" localhost: 2222 ", "localhost:2222"),
            ("localhost :2222", "localhost:2222"),
            ("'localhost:2222'", "localhost:2222"),
            ('"localhost:2222"', "localhost:2222"),
            ("\u2018localhost:2222\u2019", "localhost:2222"),
            ("\u201clocalhost\u201d:2222", "localhost:2222"),
            ("grpc://localhost:2222", "localhost:2222"),
            ("TCP://localhost:2222/", "localhost:2222"),
            ("grpc://'10.0.0.1:2222'", "10.0.0.1:2222"),
            ("my_host-1.example.com:02222", "my_host-1.example.com:2222"),
            ("[::1]:2222", "[::1]:2222"),
            ("[fe80::1%eth0]:2222", "[fe80::1%eth0]:2222"),
            ("localhost:1", "localhost:1"),
            ("localhost:65535", "localhost:65535"),
        ],
    )
    def test_spaces_quotes_and_prefixes_are_forgiven(self, text, expected):
        assert clean(text) == expected

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("localhost", "has no port; write for example localhost:2222"),
            ("localhost:", "has no port; write for example localhost:2222"),
            ("[::1]", r"has no port; write for example \[::1\]:2222"),
            ("::1", r"has no port; write for example \[::1\]:2222"),
            ("fe80::1:99999", "brackets"),
            (":2222", "has no host; write for example localhost:2222"),
            ("localhost:abc", "the port 'abc' must be a number from 1 to 65535"),
            ("localhost:22.5", "the port '22.5' must be a number"),
            ("localhost:\u0662", "must be a number"),
            ("localhost:0", "the port 0 must be from 1 to 65535"),
            ("localhost:-1", "the port -1 must be from 1 to 65535"),
            ("localhost:65536", "the port 65536 must be from 1 to 65535"),
            ("http://localhost:80", "leave out 'http://'"),
            ("a:1 b:2", "separate addresses with commas"),
            ("a;b:1", "'a;b' is not the name"),
            ("[zz]:1", "is not the name"),
            ("a/b:1", "is not the name"),
        ],
    )
    def test_a_wrong_address_is_quoted_with_what_to_write(self, text, message):
        with pytest.raises(ClusterError, match=message) as caught:
            clean(text)
        assert repr(text) in str(caught.value)
        assert "/job:ps/task:0" in str(caught.value)

    @given(st.text(max_size=30))
    def test_any_text_is_either_an_address_or_a_cluster_error(self, text):
        try:
            address = clean(text)
        except ClusterError:
            return
        assert clean(address) == address


class TestSplit:
    @pytest.mark.parametrize(
        "text",
        [
            "a:1,b:2",
            " a:1 , b:2 ",
            "a:1,b:2,",
            "'a:1,b:2'",
            "'a:1','b:2'",
            "\u201ca:1\u201d, \u201cb:2\u201d,",
            "['a:1', 'b:2']",
            "[a:1,b:2,]",
            "('a:1', 'b:2')",
        ],
    )
    def test_quotes_spaces_brackets_and_a_last_comma_are_forgiven(self, text):
        assert split_addresses(text) == ["a:1", "b:2"]

    @pytest.mark.parametrize(
        ("text", "entries"),
        [
            ("[::1]:1,[::2]:2", ["[::1]:1", "[::2]:2"]),
            ("[[::1]:1,[::2]:2]", ["[::1]:1", "[::2]:2"]),
            ("[::1]:1,[::2]", ["[::1]:1", "[::2]"]),
            ("[::1]", ["[::1]"]),
        ],
    )
    def test_brackets_of_ipv6_hosts_are_kept(self, text, entries):
        assert split_addresses(text) == entries

    def test_a_forgotten_entry_is_kept_for_the_check(self):
        assert split_addresses("a:1,,b:2") == ["a:1", "", "b:2"]

    def test_an_empty_text_has_no_entries(self):
        assert split_addresses("") == split_addresses("''") == []
