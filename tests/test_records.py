"""Tables in records are what their programs make of the lines."""

from pathlib import Path

import end_to_end_report
import pytest
import results_report

RECORDS = Path(end_to_end_report.__file__).parent / "records"
END_TO_END = RECORDS / "2026-11-22_end_to_end"
RESULTS = RECORDS / "2026-11-22_results"
HOSTS_OF_RUNS = {"ptb": 2, "cnn": 4, "cnn_after": 4}


@pytest.mark.parametrize(
    ("name", "hosts"),
    [("ptb", 2), ("ptb", 4), ("cnn", 4), ("ptb_after", 2), ("cnn_after", 4)],
)
def test_the_tables_of_the_end_to_end_record_are_made_of_its_lines(name, hosts):
    path = lambda kind: END_TO_END / f"{name}_{kind}.jsonl"
    args = end_to_end_report.Args(
        path("steps"),
        path("runs") if HOSTS_OF_RUNS.get(name) == hosts else None,
        hosts,
        torch=path("torch") if path("torch").exists() else None,
        live=tuple(END_TO_END.glob(f"{name}_{hosts}_live.jsonl")),
    )
    text = (END_TO_END / f"{name}_{hosts}.md").read_text()
    assert end_to_end_report.text(args) + "\n" == text


@pytest.mark.parametrize("workload", ["lstm_ptb", "resnet_cifar"])
def test_the_tables_of_the_results_are_made_of_their_lines(workload):
    text = (RESULTS / f"{workload}.md").read_text()
    assert results_report.text(RESULTS / f"{workload}.jsonl") + "\n" == text
