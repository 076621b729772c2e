"""Progress is a bar on a terminal, and whole lines elsewhere."""

import io

import pytest

from hf_slt import progress
from hf_slt.progress import ProgressLines, progress_bar


class Screen(io.StringIO):
    def __init__(self, terminal: bool):
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def shown(monkeypatch, terminal: bool, seconds: float = 1000.0) -> str:
    screen = Screen(terminal)
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr(progress, "SECONDS", seconds)
    with progress_bar(total=2000, desc="ticket", unit="step") as bar:
        for step in range(2000):
            bar.update()
            if step % 10 == 9:
                bar.set_postfix_str(f"loss {step}")
    return screen.getvalue()


def test_a_log_gets_a_first_and_a_last_line(monkeypatch):
    text = shown(monkeypatch, terminal=False)
    first, last = text.splitlines()
    assert first.startswith("ticket: 0 of 2000 steps")
    assert last.startswith("ticket: 2000 of 2000 steps")
    assert last.endswith(", loss 1999")
    assert "\r" not in text


def test_and_a_line_every_so_often(monkeypatch):
    lines = shown(monkeypatch, terminal=False, seconds=1e-9).splitlines()
    assert 2 < len(lines) <= 2002
    assert all(line.startswith("ticket: ") for line in lines)


def test_a_terminal_gets_a_bar(monkeypatch):
    assert "\r" in shown(monkeypatch, terminal=True)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_notebook_gets_its_own_bar(monkeypatch, terminal):
    class Widget(ProgressLines): ...

    monkeypatch.setattr(progress, "tqdm", Widget)
    monkeypatch.setattr("sys.stderr", Screen(terminal))
    assert type(progress_bar(total=3, disable=True)) is Widget
