"""What a run has found, the time that it has left, and the table at its end."""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from . import START

COLUMNS = (
    "",
    "ms",
    "times adamw",
    "GB at the peak",
    "GB planned by XLA",
    "bytes per parameter",
    "seconds to compile",
)


def seconds() -> float:
    """Returns the seconds since the program started."""
    return time.monotonic() - START


class Run:
    """Runs the parts that fit its time; whatever they find is in the file at once.

    Attributes:
      file: the JSON file.
      end: the last part ends before so many `seconds`.
      found: what was found, as the file has it.
    """

    def __init__(self, file: Path, end: float, about: Mapping[str, Any], checks: Iterable[str]):
        self.file, self.end = file, end
        self.found: dict[str, Any] = {
            **about,
            "checks": {name: {"passed": None} for name in checks},
            "updates": {},
            "train_steps": {},
            "left_out": [],
            "errors": {},
        }

    def part(self, name: str, needs: float, work: Callable, *args) -> Any:
        """Returns what ``work`` returns, or None if it raises or there are less seconds left."""
        left = self.end - seconds()
        if left < needs:
            self.found["left_out"].append(name)
            self.say(f"{name}: left out, since it may need {needs:.0f} s and {left:.0f} s are left")
            return None
        self.say(name)
        try:
            return work(*args)
        except Exception as error:
            self.found["errors"][name] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
            return None
        finally:
            self.write()

    def record(self, section: str, name: str, **figures: Any) -> None:
        """Adds figures to an entry of a section."""
        self.found[section].setdefault(name, {}).update(figures)
        self.write()

    def say(self, text: str) -> None:
        print(f"{seconds():6.1f} s  {text}", flush=True)

    def write(self) -> None:
        self.found["seconds"] = round(seconds(), 1)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(self.found, indent=2) + "\n")

    def finish(self) -> int:
        """Prints the table; returns 0 if all checks passed and no part raised an error, else 1."""
        self.write()
        print(f"\n{table(self.found)}\n")
        for name in self.found["left_out"]:
            print(f"left out: {name}")
        for name, error in self.found["errors"].items():
            print(f"failed: {name}: {error}")
        print(f"{self.found['seconds']} s, {self.file}")
        passed = all(check["passed"] for check in self.found["checks"].values())
        return 0 if passed and not self.found["errors"] else 1

    def stop_at_the_end(self) -> None:
        """Finishes and ends the process when its time is up, whatever it does then.

        Nothing else interrupts a compiler.
        """
        timer = threading.Timer(self.end - seconds(), self._stop)
        timer.daemon = True
        timer.start()

    def _stop(self) -> None:
        self.found["left_out"].append("the rest, when the time was up")
        status = self.finish()
        sys.stdout.flush()
        os._exit(status)


def table(found: Mapping[str, Any]) -> str:
    """Returns the table of a run in Markdown."""
    place = f"{found['device']}, JAX {found['jax']}, {found['date']}"
    rows = [[place, *COLUMNS], ["---"] * (len(COLUMNS) + 1)]
    rows += [[name, _result(check)] for name, check in found["checks"].items()]
    rows += [[f"update, {name}", *_cells(found, "updates", name)] for name in found["updates"]]
    rows += [
        [f"step, {name}", *_cells(found, "train_steps", name)] for name in found["train_steps"]
    ]
    return "\n".join("| " + " | ".join(_padded(row)) + " |" for row in rows)


def _padded(row: list[str]) -> list[str]:
    return row + [""] * (len(COLUMNS) + 1 - len(row))


def _result(check: Mapping[str, Any]) -> str:
    return {True: "passed", False: "**failed**", None: "**not run**"}[check["passed"]]


def _cells(found: Mapping[str, Any], section: str, name: str) -> list[str]:
    """Returns the cells of a program, without its name."""
    figures, time_of_adamw = found[section][name], found[section].get("adamw", {}).get("ms")
    ms, peak, planned = (figures.get(key) for key in ("ms", "peak_bytes", "planned_bytes"))
    largest = peak or planned
    return [
        "",
        _number(ms),
        _number(ms and time_of_adamw and ms / time_of_adamw),
        _number(peak and peak / 1e9),
        _number(planned and planned / 1e9),
        _number(largest and largest / found["parameters"]),
        _number(figures.get("compile_seconds")),
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
