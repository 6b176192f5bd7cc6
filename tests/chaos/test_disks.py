"""Some of the faults of disks, folders and files; `make chaos` runs all of them."""

from concurrent.futures import ThreadPoolExecutor

from tests.chaos.disks import CELLS, NEED_MOUNTS, can_mount, run_disk_cell

RUN = (
    "a disk that fills and frees",
    "a journal of a second ps damaged in the middle",
    "checkpoints with flipped bits",
)


def test_faults_of_disks_folders_and_files_come_to_their_outcomes() -> None:
    assert set(RUN) < set(CELLS) and set(NEED_MOUNTS) < set(CELLS)
    names = [name for name in RUN if name not in NEED_MOUNTS or can_mount()]
    with ThreadPoolExecutor(3) as pool:
        failed = [f"{r.name}: {r.problem}" for r in pool.map(run_disk_cell, names) if r.problem]
    assert not failed, "\n\n".join(failed)
