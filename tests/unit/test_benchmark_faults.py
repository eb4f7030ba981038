"""The fault bench: what it sees of a job that was killed, what it takes for wrong, its reports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from benchmark_players import options_of

from benchmarks.__main__ import main as benchmarks_main
from benchmarks.faults import command as faults
from benchmarks.faults import job, soak
from benchmarks.faults.diary import STEPS, Diary, Place, diaries, lost_samples, recovery_s
from benchmarks.faults.families import FAMILIES
from benchmarks.faults.programs import End
from benchmarks.faults.results import Outcome, Results, Summary, comparison
from benchmarks.faults.run import Bench, judge, must_replace, wrong_result
from benchmarks.faults.scenarios import SCENARIOS
from benchmarks.faults.target import Reference
from parallel_sgd import UserError

ROOT = Path(__file__).parents[2]


def test_a_diary_outlives_its_rank(tmp_path):
    for steps in (2, 5):
        pid = os.fork()
        if pid == 0:
            diary = Diary.begun(tmp_path, 2)
            for step in range(steps):
                diary.stepped(64 * (step + 1), 64)
            diary.enter(Place.EXCHANGE)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
    killed, again = diaries(tmp_path)
    assert (killed.rank, killed.place, killed.steps) == (2, Place.EXCHANGE, 2)
    assert killed.entries()["samples"].tolist() == [64, 128]
    assert (again.pid, again.steps) == (pid, 5)


def test_a_diary_that_is_full_takes_no_more(tmp_path):
    diary = Diary.begun(tmp_path, 0)
    for step in range(STEPS + 1):
        diary.stepped(step, 1)
    assert len(diary.entries()) == STEPS


def written(folder, rank, entries, begun_s=0.0):
    diary = Diary(folder / f"{rank}-{int(100 + begun_s)}.diary", "w+")
    diary._head["time_s"] = diary.begun_s = begun_s
    for number, entry in enumerate(entries):
        diary._entries[number] = entry
        diary._head["samples"][0] = number + 1
    return diary


def test_what_a_fault_has_cost(tmp_path):
    """Rank 1 is lost at 2.5 s; rank 0 had ended its step just then, and both rolled back."""
    back = [(4, 64, 0), (5, 128, 64), (6, 192, 64)]
    books = [
        written(tmp_path, 0, [(1, 64, 64), (2, 128, 64), (2.6, 192, 64), *back]),
        written(tmp_path, 1, [(1, 64, 64), (2, 128, 64)]),
        written(tmp_path, 2, [(1, 64, 64), (2, 128, 64), (4.1, 64, 0), (4.9, 128, 64)]),
    ]
    assert recovery_s(books, 2.5) == pytest.approx(2.4)
    assert [lost_samples(books, *span) for span in ((2.5, 9), (0, 2.5), (5, 9))] == [128, 0, 0]
    assert recovery_s(books[1:2], 2.5) is None


def test_what_a_fault_has_cost_where_the_job_is_started_again(tmp_path):
    """At 2.5 s it is lost, of which the ranks hear later; it goes on from 64 samples."""
    written(tmp_path, 0, [(8, 128, 64), (9, 192, 64)], begun_s=7)
    written(tmp_path, 0, [(1, 64, 64), (2, 128, 64), (2.6, 192, 64)])
    books = diaries(tmp_path)
    assert recovery_s(books, 2.5, started_again=True) == pytest.approx(5.5)
    assert recovery_s(books[:1], 2.5, started_again=True) is None
    assert lost_samples(books, 2.5, 9) == 128 and lost_samples(books, 0, 2.5) == 0


END = End(model="a", loss=0.2)


@pytest.mark.parametrize(
    ("changed", "ranks", "model", "loss", "wrong"),
    [
        ({}, 3, "a", 0.2, ""),
        ({}, 4, "a", 0.2, "3 of 4 ranks"),
        ({"model": "b"}, 3, None, 0.2, "2 different models"),
        ({}, 3, "c", 0.2, "not that of an undisturbed run"),
        ({}, 3, None, 0.1, "the loss is 0.200 nats"),
        ({}, 3, None, 0.15, ""),
    ],
)
def test_wrong_results(changed, ranks, model, loss, wrong):
    ends = {0: END, 2: END, 3: replace(END, **changed)}
    found = wrong_result(ends, ranks, model, loss)
    assert (wrong in found) if wrong else not found
    assert "nan" in wrong_result({0: replace(END, loss=float("nan"))}, 1, None)


ORPHANS = """
import subprocess
from benchmarks.faults.job import isolate, processes_left
isolate()
subprocess.run(["sh", "-c", "setsid sleep 98 & sleep 0.01 &"])
print(processes_left(0.5), processes_left(0))
"""


def test_processes_that_a_job_has_left_are_found_and_ended():
    done = subprocess.run(
        [sys.executable, "-c", ORPHANS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "['sleep 98'] []\n"


def test_files_that_a_job_has_left_are_found_and_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(job, "SHARED_MEMORY", tmp_path / "none")
    monkeypatch.setattr(job, "OF_MPIEXEC", (tmp_path.parent, f"{tmp_path.name}_*"))
    before, temporary = job.belongings(tmp_path), tmp_path / job.TEMPORARY
    of_mpiexec = tmp_path.with_name(f"{tmp_path.name}_topology")
    of_mpiexec.touch()
    assert job.files_left(before, tmp_path) == [str(of_mpiexec)]
    (temporary / "folder").mkdir(parents=True)
    (temporary / "segment").touch()
    left = [str(temporary / name) for name in ("folder", "segment")]
    assert job.files_left(before, tmp_path) == left
    assert job.files_left(before, tmp_path) == [] == os.listdir(temporary)


def target_of(folder, number=0, seed=0, key="survive", name="32-bit"):
    folder.mkdir(exist_ok=True)
    reference = Reference("a", 0.2, 1.0, 1.0, 100)
    return Bench(folder, 4, seed).target(SCENARIOS[key], key, name, number, reference)


def test_a_seed_has_the_same_victims_and_moments(tmp_path):
    def drawn(folder, seed):
        targets = [target_of(tmp_path / folder, number, seed) for number in range(8)]
        return [(target.victim, target.random.random()) for target in targets]

    first = drawn("first", 0)
    assert first == drawn("again", 0) != drawn("other", 1)
    assert len({victim for victim, _ in first}) > 1


@pytest.mark.parametrize("name", FAMILIES)
def test_victims_are_those_of_the_family(tmp_path, name):
    family, target = FAMILIES[name], target_of(tmp_path, name=name)
    serve = {target.serves(rank) for rank in family.ranks(4)}
    both = {False, family.servers > 0}
    assert serve == {"any": both, "worker": {False}, "server": {True}}[family.victims]
    assert len(family.ranks(4)) >= 2


def judged(folder, key, found, code, faults=("it",)):
    """What is said of a run that has ended so."""
    target = target_of(folder, key=key)
    for rank, end in found.items():
        text = json.dumps(end.__dict__)
        (target.folder / f"end-{rank}-{100 + rank}.json").write_text(text)
    outcome = Outcome(key, "32-bit", 0, faults=list(faults), code=code)
    target.victims[: len(faults)] = range(1, 1 + len(faults))
    target.victim = 1
    judge(target, outcome)
    return outcome


ALL, LEFT = dict.fromkeys(range(4), END), dict.fromkeys((0, 2, 3), END)


@pytest.mark.parametrize(
    ("key", "found", "code", "met", "wrong"),
    [
        ("survive", LEFT, 0, True, False),
        ("survive", LEFT, 137, False, False),
        ("survive", {0: END, 2: END}, 0, False, False),
        ("survive", {**LEFT, 3: replace(END, model="b")}, 0, True, True),
        ("spares", {**LEFT, 4: END}, 0, True, False),
        ("spares", LEFT, 0, False, False),  # where is the spare?
        ("ends", {}, 137, True, False),
        ("ends", LEFT, 0, False, False),  # as if nothing had been
        ("resume", ALL, 0, True, False),
        ("resume", LEFT, 1, False, False),
        ("resume", dict.fromkeys(range(4), replace(END, model="b")), 0, True, True),
        ("pause", ALL, 1, False, False),
    ],
)
def test_what_is_expected_of_a_scenario(tmp_path, key, found, code, met, wrong):
    outcome = judged(tmp_path, key, found, code)
    assert (outcome.met, bool(outcome.wrong)) == (met, wrong)
    assert outcome.bad == (wrong or not met)


@pytest.mark.parametrize("key", ["ends", "survive", "spares"])
def test_a_run_that_was_done_before_the_fault_is_not_counted(tmp_path, key):
    outcome = judged(tmp_path, key, ALL, 0)
    assert outcome.missed and not outcome.bad


def test_ranks_are_lost_one_after_the_other(tmp_path):
    """Two are, and those that are left count; or one, and the other's end was there before."""
    for number, found in enumerate(({0: END, 3: END}, LEFT, {0: END, 1: END, 3: END})):
        outcome = judged(tmp_path / str(number), "survive-twice", found, 0, ("first", "second"))
        faults = [["first", "second"], ["first"], ["second"]][number]
        assert outcome.met and not outcome.bad and outcome.faults == faults
    assert not judged(tmp_path / "less", "survive-twice", {0: END}, 0, faults="12").met


def test_no_spare_is_asked_for_where_nothing_is_left_to_do(tmp_path):
    target = target_of(tmp_path, key="spares")
    assert must_replace(target)
    Diary(target.folder / f"{target.victim}-1.diary", "w+").enter(Place.FINISH)
    assert not must_replace(target)


OUTCOMES = [
    Outcome("survive", "32-bit", 0, ["SIGKILL"], True, code=0, seconds=3.0,
            lost_samples=[64], recovery_s=[0.5], loss=0.2),
    Outcome("survive", "32-bit", 1, ["SIGKILL"], True, code=0, wrong="the model is another"),
    Outcome("survive", "32-bit", 2, [], True, missed=True, code=0),
    Outcome("ends", "1-bit", 0, ["SIGKILL"], hung=True, left=["python"]),
]  # fmt: skip


def read_again(report, path, capsys):
    """Return the text of a report that was written and drawn from its file."""
    report.write(path)
    pytest.importorskip("matplotlib")
    figure = path.with_suffix(".png")
    assert benchmarks_main(["faults", "--table", str(path), "--figure", str(figure)]) == 0
    assert figure.read_bytes().startswith(b"\x89PNG")
    return capsys.readouterr().out


def test_reports_count_and_are_read_again(tmp_path, capsys):
    report = Summary(Results({"mpi": "MPI 5", "ranks": 4}, OUTCOMES, machine={"cores": 2}))
    printed = read_again(report, path := tmp_path / "faults.json", capsys)
    assert "3 faults in 3 runs: 2 as they must be, 1 wrong results, 1 hangs, 1 things" in printed
    assert "survive 32-bit 1: SIGKILL: as it must be, WRONG: the model is another" in printed
    path.write_text("{}")
    assert benchmarks_main(["faults", "--table", str(path)]) == 1
    assert "not the results of this benchmark" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "verdict"), [(0.001, "equivalent"), (0.05, "worse"), (-0.05, "better")]
)
def test_losses_are_compared_with_undisturbed_ones(more, verdict):
    hit = [
        Outcome("survive", "1-bit", i, ["SIGKILL"], loss=0.3 + more + 1e-4 * i, undisturbed=0.3)
        for i in range(10)
    ]
    late = Outcome("survive", "1-bit", 10, missed=True, loss=9.0, undisturbed=0.3)
    assert comparison([*hit[1:], late]) is None
    assert comparison([*hit, late]).verdict == verdict


def sampled(memory, descriptors):
    return [
        soak.Sample("one training", 0, float(i), memory(i), descriptors(i), 3.0) for i in range(100)
    ]


def test_what_grows_in_a_soak(tmp_path, capsys):
    """A cache that fills in the beginning does not, nor does noise; a leak does."""
    flat = sampled(lambda i: 100 + min(i, 20) + i % 3, lambda i: 20 + i % 2)
    assert all(one.flat for one in soak.growths(soak.Soak(4, 60, flat)))
    leaks = sampled(lambda i: 100 + 0.2 * i, lambda i: 20 + i // 10)
    result = soak.Soak(4, 60, leaks, ["learners: exit code 1"], machine={"cores": 2})
    grow = [one.quantity for one in soak.growths(result) if not one.flat]
    assert grow == ["memory_mib", "descriptors"]
    printed = read_again(soak.Soaked(result), tmp_path / "soak.json", capsys)
    assert "3 quantities, of which 2 grow." in printed and "exit code 1" in printed


def test_what_a_process_uses():
    process = subprocess.Popen(["sleep", "98"], stdin=subprocess.DEVNULL)
    try:
        time.sleep(0.1)
        memory, descriptors, threads = soak.used(process.pid)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert 0 < memory < 10 and descriptors >= 3 and threads == 1


@pytest.mark.parametrize(
    ("key", "vendor", "root", "problem"),
    [
        ("survive", "Open MPI", False, None),
        ("survive", "MPICH", False, "this is MPICH"),
        ("cut", "MPICH", False, "needs root"),
        ("ends", "MPICH", False, None),
    ],
)
def test_impossible_scenarios_are_skipped(key, vendor, root, problem):
    found = faults.problem(SCENARIOS[key], vendor, root)
    assert found is None if problem is None else problem in str(found)


def test_a_run_that_could_not_be_keeps_the_others(tmp_path, monkeypatch, capsys):
    def disturbed(bench, scenario, key, name, number):
        if number == 0:
            raise FileNotFoundError(2, "No such file")
        return Outcome(key, name, number, ["SIGKILL"], met=True)

    monkeypatch.setattr(faults, "bound_mpi", lambda: {"vendor": "MPICH", "version": "5"})
    monkeypatch.setattr(Bench, "disturbed", disturbed)
    line = "faults --only ends survive --families 1-bit --faults 2"
    found = faults.kills(options_of(line), tmp_path, root=True)
    assert [outcome.met for outcome in found.results.outcomes] == [False, True]
    assert "no run: FileNotFoundError" in found.failures()[0]
    assert "survive is skipped: --survive needs Open MPI 5" in capsys.readouterr().err


def test_too_few_ranks_are_refused():
    with pytest.raises(UserError, match="at least 3"):
        faults.main(options_of("faults -n 2"))
