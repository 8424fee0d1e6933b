"""The replay cases of `tests/cases`, each after a public bug report, through a real fleet on the echo engine."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.invariants import assert_complete, assert_prefix, chat_line, chat_lines, input_lines, is_failed, rows_of
from tests.replays import ALL, C_LOCALE, EMPTY, IN_C_LOCALE, REFUSED, judge, refusal_problems
from tests.servers import FleetServers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.servers import Result

#: Every test ends within this, whatever happens: nothing may wait without end.
LIMIT_S = 40.0


#: What completes on the echo engine.
COMPLETED = sorted(
    name
    for name, case in ALL.items()
    if "echo" in case.targets and name not in REFUSED and name not in EMPTY and name not in IN_C_LOCALE
)


@pytest.fixture
def output(shared_fleet: FleetServers, request: pytest.FixtureRequest) -> Path:
    """An output path of the test's own."""
    name = "".join(character if character.isalnum() else "-" for character in request.node.name)
    return shared_fleet.folder / f"{name[:80]}.out"


def submit(servers: FleetServers, path: Path | str, output: Path, *options: str) -> Result:
    return servers.producer("submit", str(path), "-o", str(output), *options, timeout_s=LIMIT_S)


def assert_refused_before_anything(servers: FleetServers, run: Result, before: tuple[set[str], set[bytes]]) -> None:
    """Exit 2, no traceback, no batch in the store, no key in Redis."""
    assert run.code == 2, run.stderr
    assert "Traceback" not in run.stderr
    assert run.stdout == b""
    assert (servers.batch_ids(), batch_keys(servers)) == before


def batch_keys(servers: FleetServers) -> set[bytes]:
    return {key for key in servers.client.scan_iter("fleet:batch_*") if b":rows:" not in key and b":marks:" not in key}


@pytest.mark.parametrize("name", COMPLETED)
def test_a_file_with_bad_requests_completes_and_each_is_its_own_row(
    shared_fleet: FleetServers, output: Path, name: str
) -> None:
    case = ALL[name]
    path = case.write(output.with_suffix(".in"))

    run = submit(shared_fleet, path, output)

    rows = assert_complete(input_lines(path), output.read_bytes(), case.rows)
    assert [row["custom_id"] for row in rows] == list(case.rows)
    assert run.code == (3 if any(is_failed(row) for row in rows) else 0), run.stderr
    assert judge(case, path, run, output).problems == []


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_malformed_file_is_refused_by_line_and_nothing_is_queued(
    shared_fleet: FleetServers, output: Path, name: str
) -> None:
    output.write_bytes(b"kept\n")
    before = shared_fleet.batch_ids(), batch_keys(shared_fleet)
    path = ALL[name].path

    run = submit(shared_fleet, path, output)

    assert_refused_before_anything(shared_fleet, run, before)
    assert output.read_bytes() == b"kept\n"
    assert refusal_problems(ALL[name], path, run) == []


def test_a_repeated_id_is_named(shared_fleet: FleetServers, output: Path) -> None:
    path = ALL["I05.jsonl"].path
    repeated = json.loads(path.read_bytes().splitlines()[2])["custom_id"]

    assert repeated in submit(shared_fleet, path, output).stderr


@pytest.mark.parametrize("name", EMPTY)
def test_a_file_without_requests_returns_at_once_with_an_empty_output(
    shared_fleet: FleetServers, output: Path, name: str
) -> None:
    run = shared_fleet.producer("submit", str(ALL[name].path), "-o", str(output), timeout_s=20)

    assert run.code == 0, run.stderr
    assert output.read_bytes() == b""


@pytest.mark.parametrize("name", EMPTY)
def test_a_file_without_requests_that_is_detached_still_prints_its_id(shared_fleet: FleetServers, name: str) -> None:
    run = shared_fleet.producer("submit", str(ALL[name].path), "--detach", timeout_s=20)

    assert run.code == 0, run.stderr
    assert run.stdout.decode().strip() in shared_fleet.batch_ids()


def test_options_of_run_batch_are_taken_and_the_output_has_a_default_name(shared_fleet: FleetServers) -> None:
    path = shared_fleet.write("by-default.jsonl", chat_lines(3))

    run = shared_fleet.producer("submit", "-i", str(path), timeout_s=LIMIT_S)

    assert run.code == 0, run.stderr
    assert_complete(input_lines(path), (shared_fleet.folder / "by-default.out.jsonl").read_bytes())


def test_blank_lines_count_as_physical_lines_in_a_refusal(shared_fleet: FleetServers, output: Path) -> None:
    path = shared_fleet.write("blank.jsonl", ["", chat_line("a", "one"), "  ", "", "[]"])

    assert f"{path}:5: not a JSON object" in submit(shared_fleet, path, output).stderr


def test_total_counts_requests_and_not_lines(shared_fleet: FleetServers, output: Path) -> None:
    assert "3 ok, 0 failed" in submit(shared_fleet, ALL["I04.jsonl"].path, output).stderr


def test_an_unsupported_url_names_the_supported_ones(shared_fleet: FleetServers, output: Path) -> None:
    submit(shared_fleet, ALL["I10.jsonl"].path, output)

    (row,) = (row for row in rows_of(output.read_bytes()) if row["custom_id"] == "u-azure")
    assert "/v1/chat/completions" in row["error"]["message"]


def test_a_validation_message_does_not_grow_with_the_input(shared_fleet: FleetServers, output: Path) -> None:
    submit(shared_fleet, ALL["I42.jsonl"].path, output)

    (row,) = (row for row in rows_of(output.read_bytes()) if row["custom_id"] == "ve-many")
    assert len(json.dumps(row).encode()) <= 2 * 16 * 1024


# -- C locale ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def c_locale_fleet(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetServers]:
    """A fleet whose every process runs in the C locale, with Python's UTF-8 mode off."""
    servers = FleetServers(tmp_path_factory.mktemp("c"), **C_LOCALE)
    try:
        servers.aggregator()
        servers.worker()
        yield servers
    finally:
        servers.close()


def test_text_that_is_not_ascii_survives_the_c_locale(c_locale_fleet: FleetServers) -> None:
    case, output = ALL["I36.jsonl"], c_locale_fleet.folder / "i36.out"

    run = submit(c_locale_fleet, case.path, output, "--json")

    assert run.code == 0, run.stderr
    assert_complete(input_lines(case.path), output.read_bytes(), case.rows)
    for custom_id in case.rows:
        assert custom_id.encode() in output.read_bytes()


def test_a_file_name_that_is_not_ascii_survives_the_c_locale(c_locale_fleet: FleetServers) -> None:
    path = c_locale_fleet.write("日本.jsonl", chat_lines(1))
    output = c_locale_fleet.folder / "出力.out"

    run = submit(c_locale_fleet, path, output, "--json")

    assert run.code == 0, run.stderr
    assert_complete(input_lines(path), output.read_bytes())
    assert c_locale_fleet.producer("list").code == 0


def test_help_and_refusals_do_not_crash_in_the_c_locale(c_locale_fleet: FleetServers) -> None:
    for command in (["producer"], ["producer", "submit"], ["workers", "serve"]):
        assert c_locale_fleet.start("help", "-m", *command, "--help").wait(LIMIT_S).code == 0
    path = c_locale_fleet.write("twice.jsonl", [chat_line("é", "x"), chat_line("é", "x")])

    run = c_locale_fleet.producer("check", str(path))

    assert run.code == 2
    assert f"{path}:2: " in run.stderr
    assert "Traceback" not in run.stderr


# -- destinations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["path", "other path", "symlink", "hard link", "errors file"])
def test_an_output_that_is_the_input_is_refused_with_the_input_untouched(
    shared_fleet: FleetServers, output: Path, kind: str
) -> None:
    """O11."""
    lines = chat_lines(3)
    path = shared_fleet.write(f"o11-{kind}.jsonl", lines)
    before, content = (shared_fleet.batch_ids(), batch_keys(shared_fleet)), path.read_bytes()
    destination, more = output, []
    if kind == "path":
        destination = path
    elif kind == "other path":
        destination = path.parent / "store" / ".." / path.name
    elif kind == "symlink":
        output.symlink_to(path)
    elif kind == "hard link":
        os.link(path, output)
    else:
        more = ["--errors", str(path)]

    run = submit(shared_fleet, path, destination, *more)

    assert_refused_before_anything(shared_fleet, run, before)
    assert path.read_bytes() == content


@pytest.mark.parametrize("kind", ["missing folder", "folder", "folder that cannot be written"])
def test_a_destination_that_cannot_be_written_is_refused_before_anything(
    shared_fleet: FleetServers, output: Path, kind: str
) -> None:
    """O07: a bad destination is found before any work."""
    path = shared_fleet.write("o07.jsonl", chat_lines(3))
    before = shared_fleet.batch_ids(), batch_keys(shared_fleet)
    # Root may write everywhere but in /proc.
    destination = {
        "missing folder": output.parent / "missing" / "out.jsonl",
        "folder": output.parent / "store",
        "folder that cannot be written": output.parent.__class__("/proc/self/out.jsonl"),
    }[kind]

    run = submit(shared_fleet, path, destination)

    assert_refused_before_anything(shared_fleet, run, before)
    assert str(destination) in run.stderr
    assert len(run.stderr.splitlines()) == 1


def test_a_pipe_as_input_works(shared_fleet: FleetServers, output: Path) -> None:
    """O11."""
    lines, pipe = chat_lines(20), shared_fleet.folder / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text("".join(f"{line}\n" for line in lines)), daemon=True)
    writer.start()

    run = submit(shared_fleet, pipe, output)

    writer.join(5)
    assert run.code == 0, run.stderr
    assert_complete(lines, output.read_bytes())


# -- faults of single requests -----------------------------------------------------------------------------------------


def base40_with(number: int, **body: object) -> list[str]:
    """The forty plain requests, with a field more in one of them."""
    lines = input_lines(ALL["base40.jsonl"].path)
    request = json.loads(lines[number])
    request["body"].update(body)
    return [*lines[:number], json.dumps(request), *lines[number + 1 :]]


def test_rows_that_all_fail_are_an_output_in_order_and_a_summary(shared_fleet: FleetServers, output: Path) -> None:
    """O09."""
    lines = [line.replace('"test-model"', '"no-such-model"') for line in input_lines(ALL["base40.jsonl"].path)]
    errors = output.with_suffix(".errors")

    run = submit(shared_fleet, shared_fleet.write("o09.jsonl", lines), output, "--errors", str(errors))

    assert run.code == 3, run.stderr
    assert "0 ok, 40 failed" in run.stderr
    rows = assert_complete(lines, output.read_bytes(), dict.fromkeys(ALL["base40.jsonl"].rows, "err"))
    assert {row["error"]["code"] for row in rows} == {"model_not_found"}
    assert errors.read_bytes() == output.read_bytes()


def test_a_request_that_makes_the_engine_raise_is_one_failed_row(shared_fleet: FleetServers, output: Path) -> None:
    """C10."""
    lines = base40_with(7, echo={"raise": True})

    run = submit(shared_fleet, shared_fleet.write("c10.jsonl", lines), output)

    assert run.code == 3, run.stderr
    rows = assert_complete(lines, output.read_bytes(), {"r007": "err"})
    assert rows[7]["error"]["code"] == "internal_error"


def test_the_slowest_request_may_stand_first_and_the_order_stays(shared_fleet: FleetServers, output: Path) -> None:
    lines = base40_with(0, echo={"latency_s": 2.0})

    run = submit(shared_fleet, shared_fleet.write("c21.jsonl", lines), output)

    assert run.code == 0, run.stderr
    assert_complete(lines, output.read_bytes())


def test_a_failure_that_passes_is_tried_again_and_one_that_stays_is_a_row(
    shared_fleet: FleetServers, output: Path
) -> None:
    """C18: r003 fails twice and then answers, r004 fails three times, r005 is refused and not tried again."""
    lines = base40_with(3, echo={"status": 503, "times": 2})
    lines[4] = base40_with(4, echo={"status": 503})[4]
    lines[5] = base40_with(5, echo={"status": 400})[5]

    calls: Counter[int] = Counter()
    with shared_fleet.client.monitor() as monitor:
        run = submit(shared_fleet, shared_fleet.write("c18.jsonl", lines), output)
        shared_fleet.client.echo("that was all")
        for command in monitor.listen():
            words = str(command["command"]).split()
            if words[:2] == ["ECHO", "that"]:
                break
            if words[0] == "HINCRBY" and ":calls:" in words[1]:
                calls[int(words[2])] += 1

    assert run.code == 3, run.stderr
    rows = assert_complete(lines, output.read_bytes(), {"r004": "err", "r005": "err"})
    assert [rows[number]["response"]["status_code"] for number in (3, 4, 5)] == [200, 503, 400]
    assert {index: calls[index] for index in range(40) if calls[index] != 1} == {3: 3, 4: 3}


def test_numbers_that_are_not_json_never_reach_the_output(shared_fleet: FleetServers, output: Path) -> None:
    lines = base40_with(7, echo={"nan": True}, logprobs=True)

    assert submit(shared_fleet, shared_fleet.write("nan.jsonl", lines), output).code == 0
    assert_complete(lines, output.read_bytes())


def test_the_output_is_a_prefix_while_the_batch_runs(shared_fleet: FleetServers, output: Path) -> None:
    lines = [*chat_lines(40), chat_line("last", "slow", echo={"latency_s": 2.0})]
    process = shared_fleet.start_producer("submit", str(shared_fleet.write("grows.jsonl", lines)), "-o", str(output))
    seen, snapshots = set(), set()
    while process.running:
        found = output.read_bytes() if output.exists() else b""
        # A kernel shows a write page by page: in its very moment the last row may be there in part.
        seen.add(assert_prefix(lines, found[: found.rfind(b"\n") + 1]))
        snapshots.add(found)

    assert process.wait(1).code == 0
    assert seen & {16, 32}
    final = output.read_bytes()
    assert all(final.startswith(snapshot) for snapshot in snapshots)
    assert_complete(lines, final)
