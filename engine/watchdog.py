"""Ends a run in which nothing moves, and says who is stuck: one watchdog a rank, on threads of its own.

Each rank's last state (engine/last_state.py) goes to the process group's store a few times per timeout. A rank that
did nothing new for `cluster.hang_timeout_s` reads the others': while one of them moves (a slow save, a first compile),
it goes on waiting; so that time must exceed the longest single thing a rank does, such as building the model. When all
stand still, or are silent, the first one names the culprit, and every rank writes its state, its stacks and torch's
flight recorder to its log and leaves.

One thread talks to the store, which blocks for ever when the process that holds it is stopped; the other does not, and
ends the rank at the deadline all the same. Time counts only while the watchdog's own thread runs, so a job that was
suspended as a whole goes on. A rank that is stopped, or whose code never gives Python's lock back, is silent: its
peers write its log, and its launcher has to kill it (DeepSpeed's and torch's do, after 30 s).
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from engine import last_state
from engine.culprits import Seen, culprits, verdict
from engine.failure import EXIT_FAILED, append_to_log, claim_failure, leave

MISSED_TICKS = 2.5  # without a sign of life in so many, a rank is silent
REPORT_S = 20.0  # longest time that a hung file system may keep a rank from leaving


class Watchdog:
    """watchdog = Watchdog(...), on every rank of the process group; watchdog.close() before the group is left."""

    def __init__(self, folder: Path, *, rank: int, world_size: int, timeout_s: float):
        self.folder, self.rank, self.timeout_s = folder, rank, timeout_s
        self.tick_s = min(5.0, timeout_s / 10)
        self.keys = [str(one) for one in range(world_size)]
        self.idle_s = self.unheard_s = 0.0  # since this rank's state changed; since the store answered
        self.beats: dict[int, tuple[int, float]] = {}  # rank -> its last beat, and when that was first seen
        self.holder = Seen(0, "start", None, 0.0)  # rank 0, which holds the store unless torchrun's agent does
        self._closed, self._ending = threading.Event(), threading.Lock()
        self._threads: list[threading.Thread] = []
        if timeout_s > 0:
            # A connection of its own: the main thread holds the shared one while it waits for a key.
            store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
            self.store = dist.PrefixStore("watchdog", store)
            for run in (self._watch, self._talk):
                self._threads.append(threading.Thread(target=run, name=run.__name__, daemon=True))
                self._threads[-1].start()

    def close(self) -> None:
        self._closed.set()
        for thread in self._threads:
            thread.join(timeout=1.0)

    def _watch(self) -> None:
        seen, before = last_state.mark(), time.monotonic()
        while not self._closed.wait(self.tick_s / 2):
            now, mark = time.monotonic(), last_state.mark()
            passed = min(now - before, self.tick_s)  # more is time in which this process was suspended
            self.idle_s = self.idle_s + passed if mark == seen else 0.0
            self.unheard_s += passed
            seen, before = mark, now
            if self.idle_s >= self.timeout_s and self.unheard_s > (MISSED_TICKS + 1) * self.tick_s:
                self._end(self._without_the_store())

    def _talk(self) -> None:
        beat = 0
        try:
            while not self._closed.wait(self.tick_s):
                beat += 1
                self.store.set(str(self.rank), json.dumps(asdict(self._own(beat))))
                if self.store.check(["verdict"]):
                    self._end(json.loads(self.store.get("verdict")))
                if self.store.check(["0"]):
                    self.holder = Seen(**json.loads(self.store.get("0")))
                peers = self._peers() if self.idle_s >= self.timeout_s else {}
                self.unheard_s = 0.0
                if peers and all(seen.silent or seen.idle_s >= self.timeout_s for seen in peers.values()):
                    mine = json.dumps(self._verdict(peers))
                    self._end(json.loads(self.store.compare_set("verdict", "", mine)))
            left = Seen(last_state.current().step, "the end", "the others' end", idle_s=1e9, beat=beat)
            self.store.set(str(self.rank), json.dumps(asdict(left)))
        except dist.DistError:
            return  # the process that holds the store is gone: this rank's collectives fail, or `_watch` ends it

    def _own(self, beat: int) -> Seen:
        state = last_state.current()
        waits = last_state.name(state) if state.waits else None
        if waits is None and self.idle_s > self.timeout_s / 2:
            waits = last_state.collective_in_flight()
        return Seen(state.step, last_state.name(state), waits, self.idle_s, beat)

    def _peers(self) -> dict[int, Seen]:
        """All ranks; one is silent when it was seen without a new beat for several ticks, by this rank's clock."""
        keys = self.keys if self.store.check(self.keys) else [key for key in self.keys if self.store.check([key])]
        ranks = {int(key): Seen(0, "start", None, 0.0) for key in self.keys}
        found = zip(keys, self.store.multi_get(keys), strict=True)
        ranks |= {int(key): Seen(**json.loads(text)) for key, text in found}
        for rank, seen in ranks.items():
            beat, first = self.beats.get(rank, (-1, 0.0))
            if beat != seen.beat:
                self.beats[rank] = seen.beat, time.monotonic()
            elif time.monotonic() - first > MISSED_TICKS * self.tick_s and seen.idle_s < self.timeout_s:
                ranks[rank] = replace(seen, silent=True)
        return ranks

    def _verdict(self, ranks: dict[int, Seen]) -> dict[str, Any]:
        """The console's line, failed.json's rank, and the last known state of the ranks that cannot write their own."""
        silent = {rank: f"step {seen.step}, {seen.what}" for rank, seen in ranks.items() if seen.silent}
        stuck = culprits(ranks) or [self.rank]
        return {"line": verdict(ranks, timeout_s=self.timeout_s), "rank": stuck[0], "silent": silent}

    def _without_the_store(self) -> dict[str, Any]:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return self._verdict({0: replace(self.holder, silent=True), self.rank: self._own(0)})
        ending = self._verdict({self.rank: self._own(0)})
        return ending | {"line": ending["line"] + "; torchrun's agent, which holds the store, does not answer"}

    def _end(self, ending: dict[str, Any]) -> None:
        """Report, and end this process; does not return."""
        self._ending.acquire()  # the other thread waits here until the process is gone
        reporting = threading.Thread(target=self._report, args=(ending,), daemon=True)
        reporting.start()
        reporting.join(REPORT_S)
        if reporting.is_alive():
            print(f"{ending['line']}; {self.folder} takes no log", file=sys.stderr, flush=True)
        time.sleep(2 * self.tick_s)  # until every rank has seen the verdict: a launcher ends the others after the first
        leave(EXIT_FAILED)

    def _report(self, ending: dict[str, Any]) -> None:
        """This rank's log; the line on the console where no rank before it has claimed the failure."""
        append_to_log(self.folder, f"{ending['line']}\n{last_state.describe()}", rank=self.rank)
        with (self.folder / f"rank-{self.rank}.log").open("a") as log:
            faulthandler.dump_traceback(log)
            records = last_state.flight_records(last=8)
            log.write("\n".join(["torch's flight recorder, newest last:", *records, ""]) if records else "")
        if claim_failure(self.folder, rank=ending["rank"], error=ending["line"], outcome="hung"):
            print(ending["line"], file=sys.stderr, flush=True)
            for rank, state in ending["silent"].items():
                append_to_log(self.folder, f"silent; last state that its peers know: {state}", rank=int(rank))
