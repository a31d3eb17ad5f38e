"""Batter against pitcher: ten seasons of tables, and one season of Retrosheet's play-by-play files.

A play record is one line: inning, half, batter, count, pitches, event. A plate appearance counts
for the batter and the pitcher at its end, also where others began it.
"""

import csv
import io
import re
import zipfile
from collections.abc import Iterable, Mapping

import numpy as np

__all__ = ["batter_pitcher", "event_counts", "plate_appearance"]

# the batter's turn goes on
NOT_BATTING = ("NP", "BK", "CS", "DI", "OA", "PB", "PO", "SB", "WP", "FLE")
# (year, batter, pitcher) -> plate appearances, at-bats, hits, plays
Counts = dict[tuple[int, str, str], list[int]]


def batter_pitcher(raw: Mapping[str, bytes]) -> dict[str, np.ndarray]:
    """headtohead-YEAR.csv of several seasons and YEAReve.zip of one, as one row for each year,
    batter and pitcher.
    """
    counts: Counts = {}
    for name, data in raw.items():
        if name.endswith(".csv"):
            counts.update(_head_to_head(data.decode("ascii")))
        else:
            counts.update(_season(int(name[:4]), data))
    keys = sorted(counts)
    batters, pitchers = sorted({key[1] for key in keys}), sorted({key[2] for key in keys})
    batter_index = {player: i for i, player in enumerate(batters)}
    pitcher_index = {player: i for i, player in enumerate(pitchers)}
    values = np.array([counts[key] for key in keys], dtype=np.uint8).reshape(-1, 4)
    return {
        "year": np.array([key[0] for key in keys], dtype=np.uint16),
        "batter": np.array([batter_index[key[1]] for key in keys], dtype=np.uint16),
        "pitcher": np.array([pitcher_index[key[2]] for key in keys], dtype=np.uint16),
        "pa": values[:, 0].copy(),
        "ab": values[:, 1].copy(),
        "h": values[:, 2].copy(),
        "batter_id": np.array(batters),
        "pitcher_id": np.array(pitchers),
        "events2008": values[:, 3].copy(),
    }


def _head_to_head(text: str) -> Counts:
    """One season's table; later editions have a column PHASE, of which R is the regular season."""
    return {
        (int(row["YEAR"]), row["RESP_BAT_ID"], row["RESP_PIT_ID"]): [
            int(row["B_PA"]),
            int(row["B_AB"]),
            int(row["B_H"]),
            0,
        ]
        for row in csv.DictReader(io.StringIO(text))
        if row.get("PHASE", "R") == "R"
    }


def _season(year: int, data: bytes) -> Counts:
    """The pairs with a plate appearance, of the event files (.EVA, .EVN) of one zip archive."""
    counts: Counts = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name in sorted(archive.namelist()):
            if name.upper().endswith((".EVA", ".EVN")):
                for (batter, pitcher), new in event_counts(
                    archive.read(name).decode("latin-1").splitlines()
                ).items():
                    old = counts.get((year, batter, pitcher), [0, 0, 0, 0])
                    counts[year, batter, pitcher] = [a + b for a, b in zip(old, new, strict=True)]
    return {key: value for key, value in counts.items() if value[0]}


def event_counts(lines: Iterable[str]) -> dict[tuple[str, str], list[int]]:
    """Plate appearances, at-bats, hits and plays (all records but `NP`) of each batter and
    pitcher.
    """
    counts: dict[tuple[str, str], list[int]] = {}
    pitchers = ["", ""]  # of the visitors and of the home team
    for record in csv.reader(lines):
        if record[0] in ("start", "sub") and record[5].strip() == "1":
            pitchers[int(record[3])] = record[1]
        elif record[0] == "play":
            half, batter, event = int(record[2]), record[3], record[6]
            if event.startswith("NP"):
                continue
            total = counts.setdefault((batter, pitchers[1 - half]), [0, 0, 0, 0])
            for i, value in enumerate((*plate_appearance(event), 1)):
                total[i] += value
    return counts


def plate_appearance(event: str) -> tuple[bool, bool, bool]:
    """Whether an event ends a plate appearance, is an at-bat, is a hit.

    Walks, hit batters, interference and sacrifices are plate appearances and no at-bats. The event
    comes first, then its modifiers after slashes, then the runners' advances after a point.
    """
    play, *modifiers = re.sub(r"[!?#]", "", event).split(".")[0].split("/")
    if play.startswith(NOT_BATTING):
        return False, False, False
    if re.match(r"W|I|HP|C", play):  # WP, CS were caught above
        return True, False, False
    if re.match(r"S|D|T|H", play):  # SB, DI, HP were caught above
        return True, True, True
    sacrifice = any(re.match(r"S[FH](?![A-Z])", modifier) for modifier in modifiers)
    return True, not sacrifice, False
