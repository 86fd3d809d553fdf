"""Folders of checkpoints: crashes at every step, retention, damage of every kind, and what a resume takes. Files only."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_folder_support import (
    CONFIG_TEXT,
    MESH,
    NOBODY,
    RANK_FILE,
    SHARD,
    in_child,
    killed_before,
    limit_file_size,
    names_in,
    save,
    state_of,
    watch_files,
    write_parts,
)

from megatron_ppo.checkpoint import CheckpointFolder, TrainerState, mesh_difference, read_state
from megatron_ppo.checkpoint_manifest import COMPLETE, check_checkpoint, digest_files

Damage = Callable[[Path], object]

ITER_2, ITER_4, ITER_6, ITER_8 = "iter_0000002", "iter_0000004", "iter_0000006", "iter_0000008"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


# -- a save that is killed --------------------------------------------------------------------------------------------


def nothing(root: Path) -> None:
    """The first save of a run."""


def two(root: Path) -> None:
    """Two checkpoints, of which the older one will be deleted, and what two earlier crashes have left."""
    for iteration in (2, 4):
        save(CheckpointFolder(root, 2), iteration)
    write_parts(CheckpointFolder(root, 2).begin(5), "a crash")
    shutil.copytree(root / ITER_2, root / ".iter_0000001.deleting")


def left_line(root: Path) -> None:
    """The run went back to 4 when it had come to 6, and saves 6 again."""
    two(root)
    save(CheckpointFolder(root, 2), 6, "the line that was left")
    (root / "latest").write_text(f"{ITER_4}\n")


def only_itself(root: Path) -> None:
    """The one checkpoint of the folder is replaced by one of the same iteration."""
    save(CheckpointFolder(root, 2), 6, "the line that was left")


@pytest.mark.parametrize("before", [nothing, two, left_line, only_itself])
def test_a_save_killed_before_any_file_operation_leaves_a_whole_checkpoint(tmp_path: Path, before: Callable[[Path], None]) -> None:
    """B82: SIGKILL before each write, fsync, rename, mkdir and deletion of a save, one after the other."""
    template = tmp_path / "template"
    template.mkdir()
    before(template)
    could_be = {None} if before is nothing else {6} if before is only_itself else {4}
    for number in itertools.count(1):
        root = tmp_path / f"killed_{number}"
        shutil.copytree(template, root)
        was_killed = killed_before(number, lambda root=root: save(CheckpointFolder(root, 2), 6))
        again = CheckpointFolder(root, 2)
        found = again.newest_complete()
        iteration = None if found is None else read_state(found).iteration
        assert iteration in {*could_be, 6} if was_killed else iteration == 6, number
        for folder in root.glob("iter_*"):
            check_checkpoint(folder)
        save(again, 8)  # and the run goes on
        assert again.newest_complete() == root / ITER_8
        assert not [name for name in names_in(root) if name.startswith(".")], number
        assert len(names_in(root)) <= 3
        shutil.rmtree(root)
        if not was_killed:
            break
    assert number > 25, "the operations were not seen"


def test_a_checkpoint_that_lacks_only_its_name(root: Path) -> None:
    """It is the only one that the run has: read as it stands by anybody, and given its name, not removed, by the next save."""
    save(CheckpointFolder(root, 1), 6)
    (root / ITER_6).rename(root / f".{ITER_6}.tmp")
    assert CheckpointFolder(root, 1).newest_complete() == root / f".{ITER_6}.tmp"
    CheckpointFolder(root, 1).begin(8)
    assert names_in(root) == {ITER_6, f".{ITER_8}.tmp", "latest"}
    check_checkpoint(root / ITER_6)


def test_order_of_operations(root: Path) -> None:
    """Every file and folder is on the disk before COMPLETE, COMPLETE before the name, the name before ``latest``, that before deletions."""
    save(CheckpointFolder(root, 1), 2)

    def traced() -> str:
        seen: list[str] = []
        watch_files(lambda kind, path: seen.append(f"{kind} {os.path.relpath(path, root) if os.path.isabs(path) else path}"))
        checkpoints = CheckpointFolder(root, 1)
        write_parts(checkpoints.begin(4), "ranks that have synced nothing")
        checkpoints.finish(4, state_of(4), CONFIG_TEXT)
        return "\n".join(seen)

    status, text = in_child(traced)
    assert status == 0, text
    seen, part = text.split("\n"), ".iter_0000004.tmp"
    complete = seen.index(f"write {part}/{COMPLETE}")
    for name in (SHARD, RANK_FILE, "state.json", "config.yaml", "megatron", "ranks"):
        assert f"fsync {part}/{name}" in seen[:complete], name
    rest = [
        f"fsync {part}/{COMPLETE}",
        f"fsync {part}",
        "write .latest.tmp",
        "fsync .latest.tmp",
        f"os.rename {part}",
        "fsync .",
        "os.rename .latest.tmp",
        "fsync .",
        f"os.rename {ITER_2}",
    ]
    assert seen[complete + 1 : complete + 1 + len(rest)] == rest
    assert names_in(root) == {ITER_4, "latest"}


@pytest.mark.parametrize("limit", [60, 200, 300])
def test_a_full_disk_costs_the_new_checkpoint_only(root: Path, limit: int) -> None:
    """Files may not grow beyond a limit: the state, the configuration or the manifest does not fit."""
    save(CheckpointFolder(root, 1), 2)
    checkpoints = CheckpointFolder(root, 1)

    def with_limit() -> None:
        folder = checkpoints.begin(4)
        write_parts(folder, "a run")
        limit_file_size(limit)
        checkpoints.finish(4, state_of(4), CONFIG_TEXT + "#" * 250)

    status, text = in_child(with_limit)
    assert os.WEXITSTATUS(status) == 3, text
    assert "the checkpoint of iteration 4 cannot be written" in text and "latest names iter_0000002 as before" in text
    assert "File too large" in text and "free some space" in text
    assert names_in(root) == {ITER_2, "latest"}
    assert CheckpointFolder(root, 1).newest_complete() == root / ITER_2


def test_a_folder_that_cannot_be_written(root: Path) -> None:
    """Read-only, by a user who is not root; and a root below a file."""
    save(CheckpointFolder(root, 1), 2)
    root.chmod(0o555)

    def as_user() -> None:
        os.chdir(root.parent)
        if os.getuid() == 0:
            os.setuid(NOBODY)
        CheckpointFolder(Path("checkpoints"), 1).begin(4)

    root.parent.chmod(0o755)
    status, text = in_child(as_user)
    root.chmod(0o755)
    assert os.WEXITSTATUS(status) == 3, text
    assert "cannot be written below checkpoints (Permission denied: " in text and "latest names iter_0000002 as before" in text
    assert "--run-dir" in text
    with pytest.raises(OSError, match="there is no older one"):
        CheckpointFolder(root / ITER_2 / COMPLETE, 1).begin(4)
    assert CheckpointFolder(root, 1).newest_complete() == root / ITER_2


# -- steps that are out of order --------------------------------------------------------------------------------------


def test_wrong_use(root: Path) -> None:
    checkpoints = CheckpointFolder(root, 2)
    with pytest.raises(ValueError, match="keep_checkpoints = 0 must be at least 1"):
        CheckpointFolder(root, 0)
    with pytest.raises(RuntimeError, match="was not begun"):
        checkpoints.finish(2, state_of(2), CONFIG_TEXT)
    folder = checkpoints.begin(2)
    with pytest.raises(RuntimeError, match="was begun before"):
        checkpoints.begin(2)
    checkpoints.begin(4)  # one that is still being written stays
    assert folder.is_dir()
    checkpoints.abandon(2)
    checkpoints.abandon(2)
    assert names_in(root) == {".iter_0000004.tmp"}


def test_nodes_that_do_not_share_the_file_system(root: Path) -> None:
    """A file that another node says it has written is not here: refused before anything is called complete."""
    save(CheckpointFolder(root, 2), 2)
    checkpoints = CheckpointFolder(root, 2)
    folder = checkpoints.begin(4)
    write_parts(folder, "a run")
    digests = digest_files(folder, [SHARD])
    with pytest.raises(ValueError, match=r"written \d+ bytes of ranks/rank_00007.safetensors, but here there is no such file.*all nodes"):
        checkpoints.finish(4, state_of(4), CONFIG_TEXT, digests | {"ranks/rank_00007.safetensors": digests[SHARD]})
    assert names_in(root) == {ITER_2, "latest"}


# -- retention --------------------------------------------------------------------------------------------------------


def test_retention_keeps_the_newest(root: Path) -> None:
    """B87."""
    for iteration in (2, 4, 6):
        save(CheckpointFolder(root, 2), iteration)
    assert names_in(root) == {ITER_4, ITER_6, "latest"}
    save(CheckpointFolder(root, 2), 8)
    assert names_in(root) == {ITER_6, ITER_8, "latest"}
    assert (root / "latest").read_text() == f"{ITER_8}\n"
    for iteration in (9, 10):
        save(CheckpointFolder(root, None), iteration)
    assert names_in(root) == {ITER_6, ITER_8, "iter_0000009", "iter_0000010", "latest"}


def test_retention_goes_by_numbers(root: Path) -> None:
    """Eight digits sort before seven as text."""
    for iteration in (9_999_998, 9_999_999, 10_000_000):
        save(CheckpointFolder(root, 2), iteration)
    assert names_in(root) == {"iter_9999999", "iter_10000000", "latest"}
    assert CheckpointFolder(root, 2).candidates() == [root / "iter_10000000", root / "iter_9999999"]


def test_retention_leaves_what_is_not_its_own(tmp_path: Path, root: Path) -> None:
    elsewhere = save(CheckpointFolder(tmp_path / "other", None), 1)
    save(CheckpointFolder(root, 1), 2)
    shutil.copytree(root / ITER_2, root / "iter_3")
    shutil.copytree(root / ITER_2, root / "iter_0000001.backup")
    shutil.copytree(root / ITER_2, root / "iter_0000003")
    (root / "iter_0000003" / SHARD).unlink()  # damaged: not complete
    (root / "iter_0000000").mkdir()
    (root / "iter_0000001").symlink_to(elsewhere)
    (root / ".iter_0000001.tmp").symlink_to(elsewhere)
    (root / "notes").write_text("mine")
    foreign = names_in(root) - {ITER_2, "latest"}
    save(CheckpointFolder(root, 1), 4)
    assert names_in(root) == foreign | {ITER_4, "latest"}
    check_checkpoint(elsewhere)


def test_an_older_line_is_no_older_checkpoint(root: Path) -> None:
    """Back to 4 after 8: the new 6 stays though 8 is newer by number, and what is replaced goes only when it was complete."""
    for iteration in (4, 6, 8):
        save(CheckpointFolder(root, None), iteration, "first line")
    checkpoints = CheckpointFolder(root, 1)
    save(checkpoints, 6, "second line")
    assert names_in(root) == {ITER_6, ITER_8, "latest"}
    assert "second line" in (root / ITER_6 / SHARD).read_text()
    assert checkpoints.candidates() == [root / ITER_6, root / ITER_8]
    (root / ITER_8 / COMPLETE).unlink()
    save(checkpoints, 8, "second line")
    assert names_in(root) == {ITER_8, f"{ITER_8}.old1", "latest"}


def test_a_deletion_that_fails_does_not_end_the_run(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    for iteration in (2, 4):
        save(CheckpointFolder(root, None), iteration)
    (root / f".{ITER_2}.deleting").mkdir()
    (root / f".{ITER_2}.deleting" / "in the way").touch()
    checkpoints = CheckpointFolder(root, 1)
    checkpoints._remove_leftovers = lambda: None  # type: ignore[method-assign] - it would clear the way
    assert save(checkpoints, 6) == root / ITER_6
    assert f"{ITER_2} cannot be deleted" in caplog.text
    assert names_in(root) == {ITER_2, f".{ITER_2}.deleting", ITER_6, "latest"}


# -- damage -----------------------------------------------------------------------------------------------------------


def edit(folder: Path, change: Callable[[dict[str, list[object]]], object], **entries: object) -> None:
    """Change the manifest."""
    manifest = json.loads((folder / COMPLETE).read_text())
    change(manifest["files"])
    (folder / COMPLETE).write_text(json.dumps(manifest | entries))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def replace_by_link(path: Path) -> None:
    target = path.rename(path.with_name("elsewhere"))
    shutil.move(target, path.parent.parent.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent.parent.parent / "elsewhere")


DAMAGE: dict[str, tuple[Damage, str]] = {
    "truncated": (lambda f: os.truncate(f / SHARD, 3), r"__0_0.distcp has 3 bytes, not \d+"),
    "longer": (lambda f: os.truncate(f / SHARD, 300), r"__0_0.distcp has 300 bytes, not \d+"),
    "bit flip": (lambda f: flip(f / SHARD), r"__0_0.distcp is damaged: its content is not what was written"),
    "bit flip in the state": (lambda f: flip(f / "state.json"), "state.json is damaged"),
    "missing": (lambda f: (f / RANK_FILE).unlink(), "ranks/rank_00000.safetensors is missing"),
    "extra": (lambda f: (f / "megatron" / "__1_0.distcp").touch(), "megatron/__1_0.distcp is not in COMPLETE"),
    "no manifest": (lambda f: (f / COMPLETE).unlink(), "holds no COMPLETE.*did not come to an end"),
    "empty manifest": (lambda f: (f / COMPLETE).write_text(""), "COMPLETE is damaged: it is not JSON"),
    "half a manifest": (lambda f: os.truncate(f / COMPLETE, 60), "COMPLETE is damaged: it is not JSON"),
    "list as manifest": (lambda f: (f / COMPLETE).write_text("[]"), "COMPLETE is damaged: it must hold format 1"),
    "no files": (lambda f: edit(f, dict.clear), "COMPLETE is damaged"),
    "newer": (lambda f: edit(f, len, format=2), "has format 2, and this program reads format 1; use the newer version"),
    "up": (lambda f: edit(f, lambda d: d.update({"../x": d[SHARD]})), r"names '../x', which does not lie in its folder"),
    "inner up": (lambda f: edit(f, lambda d: d.update({"megatron/../x": d[SHARD]})), "does not lie in its folder"),
    "absolute": (lambda f: edit(f, lambda d: d.update({"/etc/passwd": d[SHARD]})), "'/etc/passwd', which does not lie"),
    "no digest": (lambda f: edit(f, lambda d: d.update({SHARD: [3]})), r"__0_0.distcp must have its size and digest, not \[3\]"),
    "true as size": (lambda f: edit(f, lambda d: d.update({SHARD: [True, d[SHARD][1]]})), "must have its size"),
    "linked file": (lambda f: replace_by_link(f / SHARD), "megatron/__0_0.distcp is a symbolic link"),
    "linked folder": (lambda f: (f / "more").symlink_to(f / "megatron"), "more is a symbolic link"),
    "pipe": (lambda f: os.mkfifo(f / "pipe"), "pipe is neither a file nor a folder"),
    "foreign folder": (lambda f: (shutil.rmtree(f), f.mkdir(), (f / "x").touch()), "holds no COMPLETE: it is no checkpoint"),
    "gone": (shutil.rmtree, "is no folder"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_passed_over(root: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = CheckpointFolder(root, None)
    for iteration in (2, 4, 6):
        save(checkpoints, iteration)
    damage, text = DAMAGE[kind]
    damage(root / ITER_6)
    with pytest.raises(ValueError, match=rf"(?s)iter_0000006.*{text}"):
        check_checkpoint(root / ITER_6)
    found = checkpoints.newest_complete()
    assert found == root / ITER_4
    assert "passed over a checkpoint" in caplog.text and "iter_0000006" in caplog.text and f"resuming from {root / ITER_4}" in caplog.text
    save(CheckpointFolder(root, None), 6)  # the run comes there again
    assert checkpoints.newest_complete() == root / ITER_6


def test_nothing_whole_is_no_new_beginning(root: Path) -> None:
    for iteration in (2, 4):
        save(CheckpointFolder(root, None), iteration)
        flip(root / f"iter_000000{iteration}" / SHARD)
    before = names_in(root)
    with pytest.raises(ValueError, match=r"(?s)none of them is whole.*iter_0000004.*iter_0000002.*--resume never begins anew"):
        CheckpointFolder(root, 1).newest_complete()
    assert names_in(root) == before


def test_what_latest_may_say(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It decides among whole checkpoints, and can lead to no other folder."""
    checkpoints = CheckpointFolder(root, None)
    assert checkpoints.newest_complete() is None
    other = save(CheckpointFolder(tmp_path / "other", None), 9)
    for iteration in (2, 4, 6):
        save(checkpoints, iteration)
    (root / "latest").write_text(f"{ITER_4}\n")
    assert checkpoints.candidates() == [root / ITER_4, root / ITER_2, root / ITER_6]
    for text in (f"../../other/{other.name}", str(other), "", "iter_6", "iter_0000006/..", "\xff"):
        (root / "latest").write_text(text)
        caplog.clear()
        assert checkpoints.newest_complete() == root / ITER_6
        assert "which is no checkpoint of this folder" in caplog.text
    (root / "latest").unlink()
    assert checkpoints.newest_complete() == root / ITER_6
    (root / "iter_0000009").symlink_to(other)
    (root / "latest").write_text("iter_0000009\n")
    assert checkpoints.newest_complete() == root / ITER_6
    assert f"is a symbolic link; name its target by --resume {other}" in caplog.text


def test_ranks_share_the_reading(root: Path) -> None:
    """Each byte is read by one of them; sizes alone do not show a flipped bit."""
    folder = save(CheckpointFolder(root, None), 2)
    for name in (SHARD, RANK_FILE, "state.json", "config.yaml"):
        kept = (folder / name).read_bytes()
        flip(folder / name)
        check_checkpoint(folder, verify="sizes")
        found = 0
        for rank in range(3):
            try:
                check_checkpoint(folder, share=(rank, 3))
            except ValueError as error:
                found += name in str(error)
        assert found == 1, name
        (folder / name).write_bytes(kept)
        check_checkpoint(folder)


def test_digests_do_not_depend_on_the_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(bytes(range(256)) * 5)
    whole = digest_files(tmp_path, ["file"])
    assert whole["file"][0] == 1280
    monkeypatch.setattr("megatron_ppo.checkpoint_manifest.CHUNK_BYTES", 7)
    assert digest_files(tmp_path, ["file"]) == whole


# -- the loop's state -------------------------------------------------------------------------------------------------


def test_the_state_comes_back_exactly(root: Path) -> None:
    folder = save(CheckpointFolder(root, None), 2)
    state = read_state(folder)
    assert state == state_of(2) and state.kl_coef == 0.1 + 0.2
    assert TrainerState.from_json(dataclasses.replace(state, wandb_run_id=None).to_json()).wandb_run_id is None
    with pytest.raises(ValueError, match="Out of range"):
        dataclasses.replace(state, kl_coef=float("nan")).to_json()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"iteration": None}, "wrong type"),
        ({"iteration": -1}, "below 0"),
        ({"version": True}, "wrong type"),
        ({"kl_coef": "0.1"}, "wrong type"),
        ({"num_optimizer_steps": 3}, "wrong type"),
        ({"mesh": {"tp": 1.5}}, "wrong type"),
        ({"wandb_run_id": 3}, "wrong type"),
        ({"sampler": {}}, "missing: none; unknown: sampler"),
    ],
)
def test_a_state_of_another_version_is_refused(tmp_path: Path, change: dict[str, object], text: str) -> None:
    (tmp_path / "state.json").write_text(json.dumps(json.loads(state_of(2).to_json()) | change))
    with pytest.raises(ValueError, match=rf"state.json cannot be used: .*{text}.*resume with the version that wrote it"):
        read_state(tmp_path)


def test_other_folders_hold_no_state(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a converted one holds weights alone"):
        read_state(tmp_path)
    (tmp_path / "state.json").write_text('{"iteration": 1}')
    missing = "consecutive_skipped, kl_coef, mesh, num_optimizer_steps, prompts, version, wandb_run_id"
    with pytest.raises(ValueError, match=f"missing: {missing}"):
        read_state(tmp_path)
    (tmp_path / "state.json").write_text("[]")
    with pytest.raises(ValueError, match="not those of this version"):
        read_state(tmp_path)


def test_both_layouts_are_stated() -> None:
    assert mesh_difference(MESH, dict(MESH)) == ""
    text = mesh_difference(MESH, {"tp": 1, "pp": 2, "dp": 1, "world": 3, "replicas": 1})
    assert [line.split() for line in text.split("\n")] == [
        ["axis", "in", "the", "checkpoint", "now"],
        ["tp", "2", "1"],
        ["pp", "1", "2"],
        ["dp", "1", "1"],
        ["world", "3", "3"],
        ["replicas", "-", "1"],
    ]
