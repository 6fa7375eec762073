"""How much memory a process may have, as the files of a system of either kind say it."""

from __future__ import annotations

from pathlib import Path

import pytest

from aqueduct.config import Flow, memory_bytes, quarter_of_memory

GiB = 1 << 30
MEMINFO = "MemTotal:       16777216 kB\nMemFree:          123456 kB\n"


def system(root: Path, **files: str) -> Path:
    """A root with these files; in a name, two underscores are a slash."""
    for name, text in {"proc__meminfo": MEMINFO, **files}.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_a_control_group_it_is_the_machines(tmp_path: Path) -> None:
    assert memory_bytes(system(tmp_path)) == 16 * GiB
    assert memory_bytes(system(tmp_path, proc__self__cgroup="0::/\n")) == 16 * GiB


def test_version_2_says_it_in_the_group_or_one_above(tmp_path: Path) -> None:
    root = system(tmp_path, proc__self__cgroup="0::/pods/one/it\n")
    groups = root / "sys/fs/cgroup"
    (groups / "pods/one/it").mkdir(parents=True)
    (groups / "pods/one/it/memory.max").write_text("max\n")
    (groups / "pods/one/memory.max").write_text(f"{2 * GiB}\n")
    (groups / "pods/memory.max").write_text(f"{3 * GiB}\n")
    assert memory_bytes(root) == 2 * GiB


def test_version_2_in_a_container_says_it_at_the_root(tmp_path: Path) -> None:
    """The path is that of the host, where the container sees its own group at the root."""
    root = system(tmp_path, proc__self__cgroup="0::/docker/abc\n")
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "sys/fs/cgroup/memory.max").write_text(f"{GiB}\n")
    assert memory_bytes(root) == GiB


def test_version_1_has_a_tree_for_memory(tmp_path: Path) -> None:
    lines = "12:cpu,cpuacct:/job\n7:memory:/job/task\n1:name=systemd:/x\n0::/job\n"
    root = system(tmp_path, proc__self__cgroup=lines)
    group = root / "sys/fs/cgroup/memory/job/task"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text(f"{4 * GiB}\n")
    (group.parent / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert memory_bytes(root) == 4 * GiB


def test_a_limit_above_the_machines_memory_is_none(tmp_path: Path) -> None:
    root = system(tmp_path, proc__self__cgroup="4:memory:/\n")
    (root / "sys/fs/cgroup/memory").mkdir(parents=True)
    (root / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text("9223372036854771712")
    assert memory_bytes(root) == 16 * GiB


@pytest.mark.parametrize("text", ["", "nonsense", "0::", "memory", "0::/../../etc\n"])
def test_what_cannot_be_read_limits_nothing(text: str, tmp_path: Path) -> None:
    assert memory_bytes(system(tmp_path, proc__self__cgroup=text)) == 16 * GiB


def test_a_system_that_says_nothing_has_some(tmp_path: Path) -> None:
    assert memory_bytes(tmp_path) > 64 << 20


def test_the_budgets_of_a_process_are_a_quarter_unless_they_are_set() -> None:
    assert quarter_of_memory() == max(memory_bytes() // 4, 64 << 20)
    flow = Flow()
    assert flow.process_receive_bytes == flow.process_send_bytes == quarter_of_memory()
    flow = Flow(process_receive_budget=1000, process_send_budget=2000)
    assert (flow.process_receive_bytes, flow.process_send_bytes) == (1000, 2000)
