"""Standard output and error of a server: nobody waits for their reader, nothing is lost that is read, and what is lost
is said in its place."""

import fcntl
import json
import os
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.core.runtime.output import LIMIT_BYTES, QueuedOutput

BEGIN = """
import logging, os, sys, threading, time
from headrace.core.runtime.logs import configure_logging
from headrace.core.runtime.output import exit_now, lost_lines, prepare_output, say
prepare_output()
configure_logging("info", "front end", sys.argv[1] if sys.argv[1:] else "text")
log = logging.getLogger("x")
"""
FLOOD = """
logging.getLogger().handlers[0].filters.clear()  # of the rate of one place
for number in range(200):
    say(f"line {number} " + "x" * 8000)  # 1.6 MB: more than the pipe and the queue take
    log.warning("line %d %s", number, "x" * 8000)
"""


@contextmanager
def program(code: str, *arguments: str, **options: object) -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", BEGIN + code, *arguments], **options) as made:  # type: ignore[call-overload]
        try:
            yield made
        finally:
            made.kill()


def test_a_pipe_that_nobody_reads_stops_neither_the_program_nor_its_end() -> None:
    reader, writer = os.pipe()
    code = FLOOD + "sys.exit(7 if lost_lines() > 50 else 8)"
    with program(code, stdout=writer, stderr=writer) as made:
        assert made.wait(60) == 7
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("form", ["text", "json"])
def test_lost_lines_are_counted_in_their_place_once_the_reader_is_back(form: str) -> None:
    reader, writer = os.pipe()
    code = FLOOD + f'os.write({writer}, b"!")\nsys.stdin.readline()\ntime.sleep(0.5)\nlog.warning("the reader is back")'
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "pass_fds": (writer,)}
    with program(code, form, **pipes) as made:
        os.close(writer)
        assert os.read(reader, 1) == b"!", "the flood is over"
        os.close(reader)
        assert made.stdin is not None
        assert made.stderr is not None
        made.stdin.write(b"\n")
        made.stdin.flush()
        lines = made.stderr.read().decode().splitlines()
        assert made.wait(30) == 0
    texts = [json.loads(line)["message"] if form == "json" else line.partition(": ")[2] for line in lines]
    numbers = [int(text.split()[1]) for text in texts if text.startswith("line ")]
    assert numbers == list(range(len(numbers))), "in order, and none twice"
    assert texts[len(numbers) :] == [
        f"{200 - len(numbers)} lines were left out here: nobody read this output",
        "the reader is back",
    ]


def test_all_that_is_read_is_written_before_a_normal_exit() -> None:
    """Also from several threads, and the traceback that a program ends with."""
    code = """
def write(name):
    for number in range(2000):
        log.info("%s %d", name, number)
logging.getLogger().handlers[0].filters.clear()
threads = [threading.Thread(target=write, args=(name,)) for name in "abc"]
for each in threads: each.start()
for each in threads: each.join()
raise ValueError("the end")
"""
    with program(code, stderr=subprocess.PIPE) as made:
        assert made.stderr is not None
        text = made.stderr.read().decode()
        assert made.wait(30) == 1
    for name in "abc":
        found = [int(line.split()[-1]) for line in text.splitlines() if f"end: {name} " in line]
        assert found == list(range(2000))
    assert "Traceback (most recent call last):\n" in text
    assert text.endswith("ValueError: the end\n")


def test_what_was_said_is_written_before_an_exit_from_a_thread() -> None:
    code = 'threading.Thread(target=lambda: (log.error("lost"), exit_now(9))).start(); time.sleep(60)'
    with program(code, stderr=subprocess.PIPE) as made:
        assert made.stderr is not None
        assert made.stderr.read().endswith(b"front end: lost\n")
        assert made.wait(30) == 9


def test_a_library_that_writes_to_the_descriptor_itself_is_not_stopped_either() -> None:
    reader, writer = os.pipe()
    code = """
from contextlib import suppress
for _ in range(100):
    with suppress(BlockingIOError):
        os.write(2, b"x" * 8000)
sys.exit(7)
"""
    with program(code, stderr=writer) as made:
        assert made.wait(30) == 7
    assert not fcntl.fcntl(writer, fcntl.F_GETFL) & os.O_NONBLOCK, "other programs that have the pipe see no change"
    os.close(reader)
    os.close(writer)


def test_a_terminal_after_ctrl_s_stops_nobody() -> None:
    ours, theirs = os.openpty()
    termios.tcflow(theirs, termios.TCOOFF)
    with program(FLOOD + "sys.exit(7)", stdout=theirs, stderr=theirs) as made:
        assert made.wait(60) == 7
    os.close(ours)
    os.close(theirs)


def test_a_file_keeps_its_position(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        file.write("before\n")
        file.flush()
        with program('say("here")', stdout=file, stderr=file) as made:
            assert made.wait(30) == 0
    assert (tmp_path / "log").read_text() == "before\nhere\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_output_to_a_full_disk_changes_no_exit_status() -> None:
    """Python itself exits with 120 when the last flush fails, and print() raises."""
    code = 'log.error("a line that cannot be written"); say("another one"); time.sleep(0.2); say("more"); sys.exit(7)'
    with Path("/dev/full").open("w") as full, program(code, stdout=full, stderr=full) as made:
        assert made.wait(30) == 7


def test_a_reader_that_has_gone_changes_no_exit_status() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with program(FLOOD + "sys.exit(7)", stdout=writer, stderr=writer) as made:
        assert made.wait(30) == 7
    os.close(writer)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_every_character_can_be_written(encoding: str) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    code = 'say("3 × 😀"); print("3 × 😀"); log.error("x 😀")'
    with program(code, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as made:
        output, log = made.communicate(timeout=30)
        assert made.returncode == 0
    text = "3 × 😀".encode(encoding, "backslashreplace") + b"\n"
    assert output == 2 * text
    assert log.endswith(b"x " + "😀".encode(encoding, "backslashreplace") + b"\n")


def test_closed_descriptors_are_not_taken_by_sockets() -> None:
    """`headrace serve >&- 2>&-`: what is printed would go to a client."""
    code = """
import socket
ours, theirs = socket.socketpair()
say("to nobody"); log.error("to nobody"); print("to nobody", file=sys.stderr)
time.sleep(0.2)
theirs.setblocking(False)
os._exit(7 if min(ours.fileno(), theirs.fileno()) > 2 else 8)
"""

    def close() -> None:
        for descriptor in (0, 1, 2):
            os.close(descriptor)

    with program(code, preexec_fn=close) as made:
        assert made.wait(30) == 7


def test_lines_that_a_full_disk_has_lost_are_said_when_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    full, written, write = True, bytearray(), os.write

    def disk(descriptor: int, data: bytes) -> int:
        if descriptor != -7:
            return write(descriptor, data)
        if full:
            raise OSError(28, "No space left on device")
        written.extend(data)
        return len(data)

    monkeypatch.setattr(os, "write", disk)
    output = QueuedOutput(-7)
    for number in range(3):
        output.write(b"%d\n" % number)
        output.drain()
    full = False
    output.write(b"3\n")
    output.drain()
    assert written == b"3 lines were left out here: nobody read this output\n3\n"
    assert output.lost_lines == 3


def test_a_piece_larger_than_the_queue_is_left_out() -> None:
    reader, writer = os.pipe()
    output = QueuedOutput(writer)
    assert output.write(b"x" * (LIMIT_BYTES + 1)) == LIMIT_BYTES + 1
    output.write(b"next\n")
    output.drain()
    assert os.read(reader, 1 << 16) == b"1 lines were left out here: nobody read this output\nnext\n"
    os.close(reader)
