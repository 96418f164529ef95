"""The terminal chat, as its person meets it."""

import subprocess
import sys
from pathlib import Path

from tests.gateway.harness import GatewayProcess

CHAT = Path(__file__).parents[2] / "scripts" / "chat.py"


def chat(url: str, said: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CHAT), "--url", url, "--temperature", "0", *flags]
    done = subprocess.run(command, input=said, capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    return done


def test_each_question_gets_an_answer_and_the_turns_before_it_count(gateway: GatewayProcess) -> None:
    done = chat(gateway.url, "hello\nhello\n/clear\nhello\n/quit\n", "--max-tokens", "8")
    assert done.returncode == 0
    first, second, third = [line.lstrip("> ") for line in done.stdout.splitlines() if line.strip("> ")]
    assert len(first) == 8
    assert (first == third, first == second) == (True, False)


def test_the_end_of_its_input_is_the_end_of_the_chat(gateway: GatewayProcess) -> None:
    assert chat(gateway.url, "").returncode == 0


def test_where_nobody_listens_it_says_what_to_start() -> None:
    done = chat("http://127.0.0.1:1", "hello\n")
    assert done.returncode == 1
    assert "start scripts/up.py" in done.stderr


def test_a_refusal_is_told_in_the_gateways_words_and_the_chat_goes_on(gateway: GatewayProcess) -> None:
    done = chat(gateway.url, "hello\n/quit\n", "--max-tokens", "999999")
    assert done.returncode == 0
    assert "limit" in done.stderr
