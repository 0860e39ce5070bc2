#!/usr/bin/env python3
"""All processes of a job are stopped, and go on together, as with Ctrl-Z and fg, docker pause, or a frozen machine: nobody
takes the pause for a death. The workers go on first, so that they find their servers silent for all of the pause."""
import signal
import time

from process import RUN, cases, children, clean_environment, expect, finish, helper, main, send, start, wait_until

# A peer is dead after 10 s, as a server with a replica is, after 20 heartbeats: a busy machine stops no process for so long.
BEAT_MS, SILENT_MS, PAUSE = 500, 10000, 12.0


@cases((), ("--replicas",), ("--scheduler=own",))
def test_a_pause_of_all(*options):
    process = start(RUN, "-n", 2, "-s", 1, *options, helper("traffic"), 8, 400000, 2,
                    env=clean_environment(MLFAB_HEARTBEAT_MS=BEAT_MS, MLFAB_SILENT_DEATH_MS=SILENT_MS))
    wanted = 3 + (2 if "--replicas" in options else 0)
    wait_until(lambda: len(children(process.pid)) >= wanted, "all processes are there")
    time.sleep(1.5)  # they train by then, or join: neither may fail
    there = children(process.pid)
    for pid in there.values():
        send(pid, signal.SIGSTOP)
    time.sleep(PAUSE)
    for worker in (True, False):
        for (role, _), pid in there.items():
            if (role == "worker") == worker:
                send(pid, signal.SIGCONT)
        time.sleep(0.1)
    result = finish(process)
    expect(result.code == 0, "the job goes on after the pause", result)
    expect("silent for" not in result.err, "nobody takes the pause for a death", result)


if __name__ == "__main__":
    main(globals())
