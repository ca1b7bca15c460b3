"""Write the figures of the attention alone between two nodes as Markdown and JSON lines."""

from pathlib import Path
from typing import Any

from bench.link.report import LINK, heading
from runtime.files import write_text
from runtime.machine import results_file
from tools.report import markdown as markdown_table
from tools.report import write_records


def markdown(result: dict[str, Any]) -> str:
    """Format the machine, what was asked, and a table per case, fastest first."""
    work = result["workload"]
    lines = [
        *heading(result),
        f"Two nodes of {result['ranks_per_node']} ranks, {result['rate']} between them in each direction, "
        f"{LINK[result['link']]}; {work['seq_length']} tokens, {work['num_heads']} heads of {work['head_dim']}, "
        f'float32, forward and backward, medians of {result["repeats"]} steps. "All rows" is a method that sends all '
        'keys and values, as each did before masks decided what travels; "on the link" what the bytes that crossed '
        "take at the link's rate, as a share of the step.",
    ]
    for case, said in result["verdicts"].items():
        rows = [row for row in result["attentions"] if row["case"] == case]
        lines += ["", *_table(case, result["masks"][case], rows, said)]
    return "\n".join(lines) + "\n"


def _table(case: str, mask: dict[str, Any], rows: list[dict[str, Any]], said: dict[str, Any]) -> list[str]:
    head = ["method", "step, s", "on the link", "without a limit, s", "crossed, MiB", "by the plan, MiB"]
    cells = [
        [row["name"], f"{row['median']:.3f}", f"{row['on_link']:.0%}", f"{row['unlimited']:.3f}"]
        + [f"{row[bytes_sent] / 2**20:.2f}" for bytes_sent in ("crossed", "attention_by_plan")]
        for row in sorted(rows, key=lambda row: row["median"])
    ]
    bound = "" if said["link_bound"] else ", too little: give a lower --rate"
    return [
        f"**{case}**: {mask['said']}, {mask['kv_heads']} KV heads",
        "",
        *markdown_table(head, cells),
        "",
        f"exchange is {said['times_as_fast']:.2f} times as fast as {said['best_of_all_rows']}, the best of the methods "
        f"that send all rows (asked: {said['asked']}, {'met' if said['met'] else 'missed'}), which spends "
        f"{said['on_link']:.0%} of its time on the link{bound}; {said['times_as_fast_as_best']:.2f} times as fast as "
        f"{said['best']}, the best of all others.",
    ]


def write(result: dict[str, Any], folder: Path) -> Path:
    """Write JSON lines and Markdown, named after the machine, over earlier ones; return the Markdown's path."""
    path = results_file(folder, "link-attention", result["machine"])
    write_records(path, result)
    write_text(path.with_suffix(".md"), "# The attention alone over a slow link\n\n" + markdown(result))
    return path.with_suffix(".md")
