"""What the command `worker` says of a command line that it cannot use, before it does anything."""

from __future__ import annotations

import pytest

from workers.cli import main


@pytest.mark.parametrize("name", ["", "a b", "a\n", "fleet:x"])
@pytest.mark.parametrize("command", [("serve", "test-model", "--engine", "echo"), ("exporter",)])
def test_what_cannot_be_a_queue_s_name_is_refused(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...], name: str
) -> None:
    """An empty one too: as a variable it would be none at all, and the worker would serve another queue."""
    with pytest.raises(SystemExit) as ended:
        main([*command, f"--queue={name}"])

    assert ended.value.code == 2
    assert "argument --queue: a queue's name must be letters, digits" in capsys.readouterr().err
