from __future__ import annotations

import ast
import inspect
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_ppo import reward_pool, rewards
from megatron_ppo.reward_pool import RewardPool
from megatron_ppo.rewards import BUILT_IN, RewardInput, extract_answer, is_equivalent, needs_answer, parse_number, resolve_reward

HALF = r"\frac{1}{2}"


def score(name: str, response: str, answer: str | None = None, *, prompt: str = "", num_response_tokens: int = 0) -> float:
    return BUILT_IN[name].function(RewardInput(prompt, response, answer, num_response_tokens=num_response_tokens))


def samples(*responses: str, answer: str | None = None) -> list[RewardInput]:
    return [RewardInput("", response, answer) for response in responses]


def descendants() -> set[int]:
    """Live processes below this one, and whatever they started in sessions of their own."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if state != "Z":
                parents[int(entry.name)] = int(parent)
    found = {os.getpid()}
    while True:
        more = {child for child, parent in parents.items() if parent in found} - found
        if not more:
            return found - {os.getpid()}
        found |= more


# -- extraction and comparison ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("#### 42\n" + "x" * 500, "42", 1),
        ("#### 42" + " and so on" * 50, "42", 1),
        ("#### 1,234", "1234", 1),
        ("$1,234.00", "1234", 1),
        (rf"so \boxed{{{HALF}}}", HALF, 1),
        (r"\boxed{1} then \boxed{2}", "2", 1),
        (r"\boxed{1} then \boxed{2}", "1", 0),
        ("no box here", "42", 0),
        ("", "42", 0),
        ("   ", "42", 0),
        ("", "", 0),
        ("142", "42", 0),
        ("42", "142", 0),
        ("4.2", "42", 0),
        ("-42", "42", 0),
        ("42 apples", "42", 1),
        ("The answer is **42**.", "42", 1),
        ("x = -5", "-5", 1),
        ("2 + 3 = 5", "5", 1),
        ("#### 2 + 3", "2", 0),
        ("#### 18\n#### 19", "18", 0),
        (r"\boxed{5} #### 6", "6", 1),
        (r"#### 6 \boxed{5}", "6", 0),
        (r"\boxed{\boxed{7}}", "7", 1),
        (r"\boxed{3} \boxed{unclosed", "3", 1),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1),
        (r"\boxed{0.5}", HALF, 1),
        (r"\boxed{.5}", "1/2", 1),
        (r"\boxed{-\frac{3}{4}}", "-0.75", 1),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1),
        (r"\boxed{x^2+2x+2}", "(x+1)^2", 0),
        (r"\boxed{2\sqrt{3}}", r"\sqrt{12}", 1),
        (r"\boxed{\text{Yes}}", "Yes", 1),
        (r"\boxed{50\%}", "50", 1),
        (r"\boxed{42}", "... so\n#### 42", 1),
        (r"\boxed{1/0}", "0", 0),
        ("<think>6 * 7</think>42", "42", 1),
        ("<answer>42</answer>", "42", 1),
    ],
)
def test_b79_math(response: str, answer: str, expected: int) -> None:
    assert score("math", response, answer) == expected


def test_b79_box_in_the_prompt_is_not_the_responses() -> None:
    assert score("math", "I do not know.", "42", prompt=r"as in \boxed{42} #### 42") == 0


def test_b79_extraction() -> None:
    assert extract_answer(rf"\boxed{{{HALF}}}") == HALF
    assert extract_answer("#### 1,234 dollars") == "1,234"
    assert extract_answer("no number") is None
    assert extract_answer("5x") is None


def test_numbers_are_compared_exactly() -> None:
    assert is_equivalent("12345678901234567890.1", "12345678901234567890.10")
    assert not is_equivalent("12345678901234567890", "12345678901234567891")
    assert parse_number("1,23") is None
    assert parse_number("1e999999999") is None


HOSTILE = [
    "__import__('os').system('touch MARKER')",
    "().__class__.__bases__[0].__subclasses__()",
    "9**9**9",
    "9^{9^{9}}",
    "9^9^9",
    "((9^{999})^{999})^{999}",
    r"9^{9\cdot 99999999}",
    "99999999!",
    "(2^{64})!",
    r"\binom{100000000}{50000000}",
    r"\sum_{n=1}^{99999999} n^{99}",
    "(99^{999}+1)^{999}",
    "(" * 399,
    "{" * 399,
    "(" * 100_000,
    r"\boxed{" * 20_000,
    "9" * 100_000,
    "1," * 50_000,
    "**" * 50_000,
]


def cpu_seconds(process: int) -> float:
    """Processor time that ``process`` has used; unlike the wall clock it does not depend on the machine's other work."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_b109_hostile_answers_score_0_quickly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bare, boxed and after ####: 0 within 2 s each, no file written, no worker lost or above 1 GiB."""
    monkeypatch.chdir(tmp_path)
    before = descendants()
    with RewardPool("math", 1, 10.0) as pool:
        (worker,) = descendants() - before
        for hostile in HOSTILE:
            for response in (hostile, rf"\boxed{{{hostile}}}", f"#### {hostile}"):
                begun = cpu_seconds(worker)
                result = pool.score(samples(response, answer="9"))
                assert (result.scores, result.num_errors) == ([0.0], 0), (response[:40], result.first_error)
                assert cpu_seconds(worker) - begun < 2.0, response[:40]
        assert descendants() - before == {worker}
        status = Path(f"/proc/{worker}/status").read_text()
        assert int(status.partition("VmHWM:")[2].split()[0]) < 1024**2  # kB
    assert list(tmp_path.iterdir()) == []


def test_b109_what_slips_through_the_checks_is_stopped_and_counted() -> None:
    with RewardPool("math", 1, 10.0) as pool:
        result = pool.score(samples(r"\boxed{(2^{64})!}", r"\boxed{\sqrt{81}}", answer="9"))
        assert (result.scores, result.num_timeouts, result.num_errors) == ([0.0, 1.0], 1, 0)


def test_b109_no_evaluation_of_data_in_reward_code() -> None:
    for module in (rewards, reward_pool):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            assert not (isinstance(node, ast.Name) and node.id in {"eval", "exec", "compile", "__import__"})
            assert not (isinstance(node, ast.alias) and node.name in {"sympy", "parse_expr", "sympify", "ExprExtractionConfig"})


# -- the other built-ins -----------------------------------------------------------------------------------------------------


def test_exact_match() -> None:
    assert score("exact_match", " a b\n", "a b") == 1
    assert score("exact_match", "a  b", "a b") == 0
    with pytest.raises(ValueError, match=r"data\.data_columns"):
        score("exact_match", "a")


@pytest.mark.parametrize(
    ("response", "expected"),
    [("1 2 3 4", 1.0), ("1 2 3", 0.75), ("1 2 3 4 5", 0.8), ("2 1 3 4", 0.5), ("", 0.0), ("4", 0.0), ("1  2\n3 4 ", 1.0)],
)
def test_token_accuracy(response: str, expected: float) -> None:
    assert score("token_accuracy", response, "1 2 3 4") == expected


def test_length() -> None:
    assert score("length", "anything", num_response_tokens=50) == -0.5
    assert score("length", "") == 0


@pytest.mark.parametrize(
    ("response", "prompt", "expected"),
    [
        ("<think>so</think>42", "", 1),
        (" <think>\nso\n</think>\n\n42\n", "", 1),
        ("so</think>42", "<think>\n", 1),
        ("so</think>42", "", 0),
        ("<think></think>42", "", 0),
        ("<think>so</think>", "", 0),
        ("<think>so 42", "", 0),
        ("42 <think>so</think>42", "", 0),
        ("<think>so</think><think>so</think>42", "", 0),
        ("", "", 0),
    ],
)
def test_format(response: str, prompt: str, expected: int) -> None:
    assert score("format", response, prompt=prompt) == expected


# -- rewards of the user's own ---------------------------------------------------------------------------------------------------


def test_spec_of_a_reward(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def half(sample):\n    return 0.5\nvalue = 3\n")
    assert resolve_reward(f"{file}:half").function(RewardInput("", "")) == 0.5
    assert resolve_reward("reward_functions:misbehave").function(RewardInput("", "abc")) == 3
    assert not needs_answer(f"{file}:half")
    assert not needs_answer(None)
    assert needs_answer("math")


@pytest.mark.parametrize(
    ("spec", "fact"),
    [
        ("maths", "neither a built-in reward"),
        (":f", "neither a built-in reward"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("missing.py:f", "there is no file missing.py"),
        ("reward_functions:nothing", "has no function 'nothing'"),
        ("reward_functions:RESULTS", "has no function 'RESULTS'"),
    ],
)
def test_bad_specs_fail_when_the_pool_is_made(spec: str, fact: str) -> None:
    before = descendants()
    for make in (resolve_reward, lambda spec: RewardPool(spec, 1, 1.0)):
        with pytest.raises(ValueError, match=r"data\.reward: ") as raised:
            make(spec)
        assert fact in str(raised.value)
    assert descendants() == before


def test_import_that_raises_or_exits(tmp_path: Path) -> None:
    for text, kind, words in (
        ("1/0", ValueError, "ZeroDivisionError"),
        ("raise SystemExit(4)", ValueError, "exits while it is imported: 4"),
        ("import os; os._exit(4)", RuntimeError, "code 4"),
    ):
        (tmp_path / "bad.py").write_text(text)
        with pytest.raises(kind, match=words):
            RewardPool(f"{tmp_path}/bad.py:f", 1, 1.0)


def test_a_child_that_a_reward_forks_answers_for_no_sample(tmp_path: Path) -> None:
    """It comes back into the worker's loop; its answer would be taken for a neighbour's."""
    code = "import os\ndef f(s):\n    child = os.fork()\n    return float(len(s.prompt)) if child else -1000.0\n"
    (tmp_path / "forks.py").write_text(code)
    with RewardPool(f"{tmp_path}/forks.py:f", 2, 5.0) as pool:
        for _ in range(3):
            result = pool.score([RewardInput("p" * i, "r") for i in range(6)])
            assert result.scores == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
            assert result.num_errors == result.num_timeouts == 0


def test_the_schedulers_signals_cost_no_score() -> None:
    """Slurm sends them to every process of a step, and the ranks then save what was scored."""
    with RewardPool("reward_functions:signalled", 1, 30.0) as pool:
        result = pool.score(samples("x", "y"))
    assert result.scores == [1.0, 1.0] and result.num_errors == result.num_timeouts == 0


# -- the pool ------------------------------------------------------------------------------------------------------------------


def test_b80_loops_time_out_and_leave_no_process() -> None:
    """One of 8 loops forever, 5 times: its score is 0, counted, the others' are right, and no more processes live than before."""
    responses = ["a", "bb", "ccc", "loop", "dddd", "a", "bb", "child"]
    before = descendants()
    with RewardPool("reward_functions:misbehave", 2, 1.0) as pool:
        num_workers = len(descendants() - before)
        assert num_workers == 2
        for _ in range(5):
            begun = time.monotonic()
            result = pool.score(samples(*responses))
            assert time.monotonic() - begun < 10.0
            assert result.scores == [1.0, 2.0, 3.0, 0.0, 4.0, 1.0, 2.0, 0.0]
            assert (result.num_timeouts, result.num_errors) == (2, 0)
        assert len(descendants() - before) == 2
    assert descendants() == before
    assert subprocess.run(["pgrep", "-fx", "sleep 1234.5"], check=False, capture_output=True).stdout == b""


def test_errors_score_0_and_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    failing = ["raise", "exit", "nan", "inf", "none", "text", "complex", "big"]
    with RewardPool("reward_functions:misbehave", 2, 5.0) as pool, caplog.at_level(logging.WARNING):
        for _ in range(2):
            result = pool.score(samples("abc", *failing, "true", "fraction", "decimal"))
            assert result.scores == [3.0] + [0.0] * len(failing) + [1.0, 0.25, 0.75]
            assert (result.num_timeouts, result.num_errors) == (0, len(failing))
        first = pool.score(samples("raise")).first_error
        assert first is not None and "KeyError: 'the text of the error'" in first and "misbehave" in first
    assert len(caplog.records) == 1
    with pytest.raises(RuntimeError, match="closed"):
        pool.score(samples("abc"))


def test_built_ins_that_cannot_hang_start_no_process() -> None:
    before = descendants()
    for name, reward in BUILT_IN.items():
        with RewardPool(name, 1, 5.0) as pool:
            assert (descendants() == before) == reward.cannot_hang
            result = pool.score([RewardInput("", "<think>a</think>42", "42", num_response_tokens=100)])
            expected = {"exact_match": 0.0, "token_accuracy": 0.0, "length": -1.0, "format": 1.0, "math": 1.0}[name]
            assert result.scores == [expected]
            assert pool.score([]).scores == []
    with RewardPool("exact_match", 1, 5.0) as pool:
        result = pool.score(samples("42"))
        assert (result.scores, result.num_errors) == ([0.0], 1)


def test_workers_are_light_and_see_the_whole_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with RewardPool("reward_functions:environment", 1, 5.0) as pool:
        assert pool.score([RewardInput("p", "r", "a", {"n": 5}, 7, True)]).scores == [1.0]
    with RewardPool("reward_functions:process_id", 2, 5.0) as pool:
        assert len(set(pool.score(samples(*"abcdefgh")).scores)) == 2


def test_workers_die_with_a_killed_parent() -> None:
    program = (
        "import os, time\nfrom megatron_ppo.reward_pool import RewardPool\nfrom megatron_ppo.rewards import RewardInput\n"
        "pool = RewardPool('reward_functions:process_id', 1, 60.0)\n"
        "print(int(pool.score([RewardInput('', '')]).scores[0]), flush=True)\ntime.sleep(60)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        os.kill(worker, 0)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    deadline = time.monotonic() + 5.0
    while Path(f"/proc/{worker}").exists() and "Z" not in Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2]:
        assert time.monotonic() < deadline, "the worker outlived its parent"
        time.sleep(0.02)


def test_limits_of_the_pool_are_checked() -> None:
    with pytest.raises(ValueError, match="reward_num_workers = 0"):
        RewardPool("length", 0, 1.0)
    with pytest.raises(ValueError, match=r"reward_timeout_s = 0\.0"):
        RewardPool("length", 1, 0.0)
