#!/usr/bin/env python3
"""mlfab-run: prefixes, exit statuses, signals, --on-failure. The ranks are shell scripts, so that only the
cases with the built-in server depend on the library. What sleeps 600 s has to be ended, for no test waits so long."""
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import time

from process import (RUN, cases, clean_environment, end, executable, expect, finish, helper, is_alive, launch, main, send,
                     start, wait_until, within)


REPEAT = 0.2  # seconds: mlfab-run takes two signals in this time for one request


def shell(script):
    return ["sh", "-c", script]


def is_told(name):
    """A piece of a shell script: the number of its process is in a file of this name, whole at once."""
    return 'echo $$ >%s.part; mv %s.part %s; ' % (name, name, name)


def has_ended(name):
    """Another piece: waits until the process with the number in the file has ended, and mlfab-run has read its status."""
    return 'until [ -e %s ]; do sleep 0.01; done; while kill -0 $(cat %s) 2>/dev/null; do sleep 0.01; done; ' % (name, name)


def test_every_rank_gets_its_place():
    result = launch("-n", 3, "-s", 0, *shell('echo "$MLFAB_RANK/$MLFAB_WORKERS $MLFAB_JOB '
                                            '$MLFAB_COORDINATOR $MLFAB_DEDICATED"'))
    expect(result.code == 0, "exit status", result)
    lines = sorted(result.out.splitlines())
    expect(len(lines) == 3, "a line a worker", result)
    for number, line in enumerate(lines):
        expect(re.match(r"\[worker %d\] %d/3 run-\S+ unix:@mlfab-\S+ 0$" % (number, number), line),
               "the line of worker %d" % number, result)
    expect(len({line.split()[3] for line in lines}) == 1, "one job", result)


def test_every_run_has_a_key_of_its_own():
    inherited = "0123456789abcdef" * 2
    keys = set()
    for servers in (1, 0, 0):  # a server that nobody joins is waited for
        result = launch("-n", 2, "-s", servers, "--verbose", *shell(
            'echo "key=$MLFAB_KEY"; '
            'case "$(cat /proc/[0-9]*/cmdline 2>/dev/null | tr "\\0" " ")" in '
            '*"$MLFAB_KEY"*) echo "on a command line" ;; esac'),
            env=clean_environment(MLFAB_KEY=inherited))
        expect(result.code == 0 and "command line" not in result.out, "not on a command line", result)
        told = re.findall(r"key=(\S*)", result.out)
        expect(len(told) == 2 and told[0] == told[1], "both workers were told it", result)
        expect(re.match("[0-9a-f]{64}$", told[0]), "256 bits", result)
        expect((result.out + result.err).count(told[0]) == 2, "it is told nowhere else", result)
        keys.add(told[0])
    expect(len(keys) == 3 and inherited not in keys, "another one each time", keys)


@cases(("tcp", r"tcp:127\.0\.0\.1:\d+"), ("shm", r"shm:mlfab-\S+"))
def test_transport_options(name, coordinator):
    result = launch("-n", 1, "-s", 0, "--" + name, *shell('echo "$MLFAB_TRANSPORT $MLFAB_COORDINATOR"'))
    expect(re.match(r"\[worker 0\] %s %s\n$" % (name, coordinator), result.out), name, result)


def test_both_outputs_are_forwarded_in_whole_lines():
    result = launch("-n", 2, "-s", 0, *shell("echo to out; echo to err >&2; printf unfinished"))
    for rank in (0, 1):
        expect("[worker %d] to out\n[worker %d] unfinished\n" % (rank, rank) in
               "".join(l + "\n" for l in result.out.splitlines() if "worker %d" % rank in l),
               "stdout of %d" % rank, result)
        expect("[worker %d] to err\n" % rank in result.err, "stderr of %d" % rank, result)


def test_long_lines_lose_nothing():
    result = launch("-n", 1, "-s", 0, *shell("head -c 100000 /dev/zero | tr '\\0' x; echo"))
    lines = result.out.splitlines()
    expect(len(lines) > 1, "it comes in pieces", len(lines))
    expect(all(line.startswith("[worker 0] ") for line in lines), "each with the prefix")
    expect(sum(len(line) - len("[worker 0] ") for line in lines) == 100000, "all of it")


def test_no_prefix_passes_through():
    result = launch("-n", 1, "-s", 0, "--no-prefix", *shell("echo plain"))
    expect(result.out == "plain\n", "as it was written", result)


def test_the_input_is_worker_0s():
    process = start(RUN, "-n", 3, "-s", 0, *shell('read -r line; echo "got <$line>"; cat'),
                    stdin=subprocess.PIPE)
    process.stdin.write("a line\nand more\n")
    process.stdin.close()
    process.stdin = None
    result = finish(process)
    expect(result.code == 0, "exit status", result)
    own = [line for line in result.out.splitlines() if line.startswith("[worker 0]")]
    expect(own == ["[worker 0] got <a line>", "[worker 0] and more"], "all of it", result)
    expect("[worker 1] got <>" in result.out and "[worker 2] got <>" in result.out,
           "the others have none", result)


def in_terminal(arguments, typed, until, look=lambda shown: None):
    """Runs mlfab-run in the foreground of a terminal of its own. Returns its output up to the text `until`, or
    to its end, and closes the terminal. look() gets the output so far, again and again."""
    master, slave = pty.openpty()
    # The shell leads a session without a terminal, and the first one that it opens becomes that of the session.
    process = subprocess.Popen(["sh", "-c", 'exec "$@" <"$0" >"$0" 2>&1', os.ttyname(slave), RUN, *map(str, arguments)],
                               env=clean_environment(TERM="dumb"), start_new_session=True)
    shown, sent = "", False

    def read():
        nonlocal shown, sent
        if not sent and (typed is None or "ready" in shown):
            sent = True
            os.write(master, (typed or "").encode())
        if select.select([master], [], [], 0.1)[0]:
            shown += os.read(master, 65536).decode()
        look(shown)
        return until in shown or process.poll() is not None

    try:
        wait_until(read, lambda: "it shows '%s': %s" % (until, shown))
        os.close(slave)
    finally:
        os.close(master)  # hangs up
        process.kill() if until not in shown else process.wait()
    return shown


def test_lines_are_shown_when_they_are_printed():
    program = "import sys, time; print('here', sys.stdout.isatty()); time.sleep(600)"
    shown = in_terminal(["-n", 2, "-s", 0, sys.executable, "-c", program], None,
                           "[worker 1] here True\r\n")
    expect("[worker 1] here True\r\n" in shown, "before the program ends", shown)
    expect("\r\r" not in shown, "as it was written", shown)


def test_what_is_typed_comes_to_worker_0():
    shown = in_terminal(["-n", 2, "-s", 0, "sh", "-c", "echo ready; read x; echo got $x; exec cat"],
                           "a word\nanother\n\x04", "[worker 0] another")
    expect("[worker 0] got a word" in shown and "[worker 1] got a" not in shown, "and to nobody else",
           shown)


def test_text_without_a_newline():
    """It is shown, with its prefix once; another worker's line does not continue it."""
    program = ("import os, sys, time\nshow = lambda text: (print(text, end='', flush=True), time.sleep(1))\n"
               "if os.environ['MLFAB_RANK'] == '0':\n  show('10%'); show(' 20%')\n"
               "else:\n  while not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
               "  print('a line'); show('last')\n"
               "time.sleep(600)")
    with tempfile.TemporaryDirectory() as folder:
        go = os.path.join(folder, "go")
        shown = in_terminal(["-n", 2, "-s", 0, sys.executable, "-c", program, go], None, "[worker 1] last",
                            lambda shown: "20%" in shown and open(go, "w", encoding="ascii").close())
    lines = [line for line in shown.split("\r\n") if line.startswith("[worker 0]")]
    expect(lines in (["[worker 0] 10% 20%"], ["[worker 0] 10%", "[worker 0]  20%"]), "each line has one prefix", shown)
    expect("\r\n[worker 1] a line\r\n" in shown, "lines do not mix", shown)


@cases(("-s", 0), ("-s", 1), ("-s", 1, "--set", "timeout_ms=4000"), ("--server", "true"))
def test_nobody_joined(*servers):
    """The run ends well if a server gives up waiting, and if another program is the server. mlfab-run waits 5 s for servers."""
    result = launch("-n", 2, *servers, *shell("exit 0"))
    expect(result.code == 0, "the programs' own status", result)
    expect(result.err.count("no rank joined: 2 workers of sh ended with status 0") == 1, "it is said", result)


@cases(("-s", 0), ("-s", 1), ("--server", helper("probe")), ("-s", 1, "--replicas"))
def test_all_joined(*servers):
    result = launch("-n", 2, *servers, helper("probe"))
    expect(result.code == 0 and "joined" not in result.err, "nothing to say", result)
    result = launch("-n", 1, *servers, *shell("exit 3"))
    expect(result.code == 3 and "joined" not in result.err, "that is said already", result)


NOT_CLOSED = "mlfab-run: worker %d ended with status 0 without mlfab_close; others that wait for it get an error"


@cases(("quit", 0), ("quit", 1), ("fork", 0))
def test_status_0_without_close(how, servers):
    result = launch("-n", 2, "-s", servers, *shell('[ "$MLFAB_RANK" = 1 ] && exec "$0" 0 %s; exec "$0"' % how), helper("probe"))
    expect(result.code == 1, "a failure", result)
    expect(result.err.count("without mlfab_close") == 1 and NOT_CLOSED % 1 in result.err.splitlines(), "one line", result)


@cases('"$0"', '"$0" 0 forked', '"$0" 0 exec', '"$0" && "$0"',
       '"$0" 500 >told & until grep -q open told; do sleep 0.01; done',  # it is left to a process that closes later
       'MLFAB_WORKERS=0 "$0"; exit 0')
def test_status_0_with_close(script):
    """Closed by the rank itself or by a program that it runs, or never opened: nothing is said."""
    with tempfile.TemporaryDirectory() as folder:
        result = launch("-n", 1, "-s", 0, *shell(script), helper("probe"), cwd=folder)
        expect(result.code == 0 and "mlfab_close" not in result.err, "nothing to say", result)


def test_a_part_that_is_killed_has_not_closed():
    """The rank's own process ends with 0."""
    with tempfile.TemporaryDirectory() as folder:
        script = '"$0" 600000 >told & until grep -q open told; do sleep 0.01; done; kill -9 $!; wait; exit 0'
        result = launch("-n", 1, "-s", 0, *shell(script), helper("probe"), cwd=folder)
        expect(result.code == 1 and NOT_CLOSED % 0 in result.err, "it is told", result)


def test_no_colour_in_a_pipe():
    result = launch("-n", 1, "-s", 0, *shell("echo x"))
    expect("\033" not in result.out + result.err, "no escapes", result)


def test_wrong_usage_exits_with_2():
    for arguments in ([], ["-n", "0", "true"], ["-n", "x", "true"], ["-n", "-1", "true"],
                      ["-n", "2"], ["-n", "1", "--what", "true"], ["-n"],
                      ["-n", "1", "--tcp", "--shm", "true"],
                      ["-n", "1", "--on-failure=never", "true"],
                      ["-n", "1", "--timeout", "0", "true"], ["-n", "99999999999", "true"]):
        result = launch(*arguments)
        expect(result.code == 2, "exit status for %s" % arguments, result)
        expect(result.err.startswith("mlfab-run: ") and result.err.count("\n") == 1 and not result.out, "one line on stderr", result)
    result = launch("--help")
    expect(result.code == 0, "help", result)
    for words in ("Exit status:", "Order of ends:", "Signals:", "SIGTSTP"):
        expect(words in result.out, words, result)


@cases((["-np", 4], "-n N"), (["-np4"], "-n N"), (["--nproc-per-node=4"], "-n N"), (["--nproc_per_node", 4], "-n N"),
       (["-n", 4, "-x", "PATH"], "environment"), (["-H", "a:1,b:1"], "this host only"))
def test_options_of_other_launchers(options, text):
    result = launch(*options, "true")
    told = result.err.split("\n")[0]
    expect(result.code == 2 and options[-2 if len(options) > 1 else 0] in told and text in told, "a hint", result)


def test_options_of_the_program_are_its_own():
    result = launch("-n", 1, "-s", 0, "echo", "-np", "4", "-x", "-H")
    expect(result.code == 0 and result.out == "[worker 0] -np 4 -x -H\n", "as they are", result)


def test_settings_reach_the_ranks():
    result = launch("-n", 2, "-s", 0, "--set", "optimizer=adam", "--set", "filter_top=0.5", "--set", "timeout_ms=500",
                    *shell('echo "$MLFAB_OPTIMIZER $MLFAB_FILTER_TOP $MLFAB_TIMEOUT_MS"'))
    expect(result.code == 0, "exit status", result)
    expect(sorted(result.out.splitlines()) == ["[worker %d] adam 0.5 500" % n for n in (0, 1)], "settings", result)
    for setting, why in (("optimizer", "NAME=VALUE"), ("=x", "NAME=VALUE"), ("optimizer=best", "optimizer='best'"),
                         ("optimizer=adamw", "optimizer='adamw': not one of: sgd momentum"),
                         ("optimizer=adamw", ". AdamW is adam with a weight_decay above 0\n"),
                         ("filter_top=2", "filter_top='2'"), ("workers=0", "workers='0'"), ("wheels=4", "wheels='4'")):
        result = launch("-n", 1, "--set", setting, "true")
        expect(result.code == 2 and why in result.err and result.err.count("\n") == 1, setting, result)


def test_command_not_found_exits_with_127():
    result = launch("-n", 2, "-s", 0, "./no-such-program")
    expect(result.code == 127, "exit status", result)
    expect("cannot start ./no-such-program: No such file" in result.err, "why", result)


def test_exit_status_of_the_first_that_fails():
    """The others are ended."""
    result = launch("-n", 3, "-s", 0,
                    *shell('[ "$MLFAB_RANK" = 1 ] && exit 7; sleep 600'))
    expect(result.code == 7, "exit status", result)
    expect("worker 1 exited with status 7" in result.err, "which and why", result)


def test_signal_is_named():
    result = launch("-n", 2, "-s", 0, *shell('[ "$MLFAB_RANK" = 1 ] && kill -SEGV $$; sleep 600'))
    expect(result.code == 128 + signal.SIGSEGV, "exit status", result)
    expect("worker 1 was killed by SIGSEGV" in result.err, "which and why", result)


def test_a_rank_that_ignores_sigterm_is_killed():
    with tempfile.TemporaryDirectory() as folder:
        result = launch("-n", 2, "-s", 0, cwd=folder,
                        *shell('[ "$MLFAB_RANK" = 1 ] && { until [ -e ignores ]; do sleep 0.01; done; exit 3; }; '
                               'trap "" TERM; echo >ignores; while :; do sleep 1; done'))
    expect(result.code == 3, "exit status", result)
    expect(result.seconds > 1.5, "after two seconds", result)


def test_on_failure_continue():
    with tempfile.TemporaryDirectory() as folder:
        result = launch("-n", 2, "-s", 0, "--on-failure=continue", cwd=folder,
                        *shell('[ "$MLFAB_RANK" = 1 ] && { %sexit 5; }; %ssleep 0.5; echo finished'
                               % (is_told("failed"), has_ended("failed"))))
    expect(result.code == 5, "exit status", result)
    expect("[worker 0] finished" in result.out, "the other went on", result)


def test_on_failure_restart():
    with tempfile.TemporaryDirectory() as folder:
        result = launch("-n", 2, "-s", 0, "--on-failure=restart", *shell(
            'if [ "$MLFAB_RANK" = 1 ]; then echo life >> %s/lives; '
            '[ $(wc -l < %s/lives) -lt 4 ] && exit 9; fi; echo done as $MLFAB_RANK' % (folder, folder)))
        expect(result.code == 0, "exit status", result)
        expect("[worker 1] done as 1" in result.out, "the same rank", result)
        expect(result.err.count("starting worker 1 again") == 3, "three times", result)


def test_restarts_have_a_limit():
    result = launch("-n", 2, "-s", 0, "--on-failure=restart",
                    *shell('[ "$MLFAB_RANK" = 1 ] && exit 9; sleep 600'))
    expect(result.code == 9, "exit status", result)
    expect(result.err.count("starting worker 1 again") == 10, "ten times", result)


@cases("end", "continue", "restart")
def test_a_lost_server_ends_the_run(mode):
    result = launch("-n", 1, "-s", 1, "--server", "false", "--on-failure=" + mode, *shell("sleep 600"))
    expect(result.code == 1, "exit status", result)
    expect("server 0 exited with status 1" in result.err, "which and why", result)


def test_servers_are_ended_after_the_workers():
    with tempfile.TemporaryDirectory() as folder:
        script = executable(os.path.join(folder, "server.sh"), b"#!/bin/sh\nexec sleep 600\n")
        result = launch("-n", 1, "--server", script, *shell("exit 0"))
        expect(result.code == 0, "exit status", result)
        expect(result.seconds > 4, "after five seconds", result)


def test_a_server_program_handles_its_signals():
    """Also one that is a shell, which cannot trap a signal that was ignored when it began."""
    with tempfile.TemporaryDirectory() as folder:
        script = executable(os.path.join(folder, "server.sh"), b"#!/bin/sh\n"
                            b'for name in INT HUP USR1 USR2 TSTP; do trap "echo got $name" $name; done\n'
                            b'trap "echo got TERM; exit 0" TERM\necho up\nwhile :; do sleep 0.05; done\n')
        process = start(RUN, "-n", 1, "--server", script, *shell('read -r line; exit 0'), stdin=subprocess.PIPE)
        process.stdout.readline()
        (server,) = (pid for pid in children(process.pid) if b"server.sh" in open("/proc/%d/cmdline" % pid, "rb").read())
        for name in ("INT", "HUP", "USR1", "USR2", "TSTP"):
            send(server, getattr(signal, "SIG" + name))
            line = process.stdout.readline()
            expect(line.endswith("got %s\n" % name), "a trap", line)
        result = finish(process)
        expect(result.code == 0 and "[server 0] got TERM" in result.out, "it ends when it is told to", result)


@cases("HUP", "USR1", "USR2", "TSTP", "PIPE")
def test_what_was_ignored_stays_ignored(name):
    """In mlfab-run, which goes on, and in its ranks; and nothing else is."""
    tell_ignored = 'sed -n "s/^SigIgn:.//p" /proc/$$/status; '
    number = getattr(signal, "SIG" + name)
    process = start("sh", "-c", 'trap "" %s; %s exec "$@"' % (name, tell_ignored), "sh", RUN, "-n", 1, "-s", 0, "--no-prefix",
                    *shell(tell_ignored + "read -r line; exit 0"), stdin=subprocess.PIPE)
    before, after = (int(process.stdout.readline(), 16) for _ in range(2))
    asked = 1 << signal.SIGINT - 1 | 1 << signal.SIGTERM - 1  # these it passes on in any case
    expect(after == before & ~asked and after >> number - 1 & 1, "the same signals", (before, after))
    if name != "PIPE":
        process.send_signal(number)
    expect(finish(process).code == 0, "it goes on until its input ends")


def test_a_server_that_fails_at_the_end_is_told():
    with tempfile.TemporaryDirectory() as folder:
        script = executable(os.path.join(folder, "server.sh"), b"#!/bin/sh\n%sexit 4\n" % has_ended("worker").encode())
        result = launch("-n", 1, "--server", script, *shell(is_told("worker") + "exit 0"), cwd=folder)
        expect(result.code == 0, "all workers ended well", result)
        expect("server 0 exited with status 4" in result.err, "which and why", result)


@cases("server", "scheduler", "replica")
def test_a_helper_that_is_killed_at_the_end_is_told(role):
    """It is stopped, so that it does not end by itself, and killed when the workers have ended."""
    process = start(RUN, "-n", 1, "--replicas", "--no-prefix", "--verbose", helper("saver"), 0)
    process.stdout.readline()
    victim = [pid for pid, name in helpers(process.pid) if name == role][0]
    send(victim, signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    errors = ""
    while "worker 0 has finished" not in errors:
        line = process.stderr.readline()
        expect(line, "the worker ends well", errors)
        errors += line
    send(victim, signal.SIGKILL)
    result = finish(process)
    expect(result.code == 0, "all workers ended well", (errors, result))
    expect("0 was killed by SIGKILL" in result.err, "which and why", result)


def test_timeout():
    result = launch("-n", 1, "-s", 0, "--timeout", "0.5", *shell("sleep 600"))
    expect(result.code == 124, "exit status", result)
    expect("not finished after 0.5 s" in result.err, "why", result)


def children(parent):
    with open("/proc/%d/task/%d/children" % (parent, parent), encoding="ascii") as file:
        return [int(pid) for pid in file.read().split()]


def helpers(parent):
    """Process and role of what mlfab-run has started beside the workers."""
    found = []
    for pid in children(parent):
        with open("/proc/%d/environ" % pid, "rb") as file:
            match = re.search(rb"\0MLFAB_ROLE=(\w+)", b"\0" + file.read())
        role = match[1].decode() if match else "worker"
        with open("/proc/%d/cmdline" % pid, "rb") as file:
            built_in = b"--mlfab-run-server" in file.read()
        if built_in:
            found.append((pid, role))
    return found


def state(pid):
    with open("/proc/%d/stat" % pid, encoding="ascii") as file:
        return file.read().rsplit(")", 1)[1].split()[0]


@cases(("-s", 2), ("-s", 1, "--scheduler=own"), ("-s", 1, "--replicas"))
def test_helpers_outlive_the_workers(*options):
    """Each process of the job gets what a job manager sends. The helpers get it first, and the workers still save."""
    process = start(RUN, "-n", 2, *options, helper("saver"), 300)
    for _ in range(2):
        expect(process.stdout.readline().endswith(" up\n"), "it trains")
    for name in ("USR1", "USR2", "HUP", "INT", "TSTP", "TERM"):
        for pid, _ in helpers(process.pid):
            send(pid, getattr(signal, "SIG" + name))
    for pid in [*children(process.pid), process.pid]:
        send(pid, signal.SIGTERM)
    result = finish(process)
    expect(result.code == 0 and result.out.count(" saved\n") == 2, "both save the model", result)
    expect("killed" not in result.err and "again" not in result.err, "no helper died", result)


@cases(())
@within(4000)
def test_a_failure_lets_the_others_save(ms):
    """The servers serve until the last worker has ended. They have 2 s, and sleep for a part of it."""
    process = start(RUN, "-n", 2, "-s", 2, "--timeout", "%dms" % ms, "--scheduler=own", helper("saver"), 100)
    result = finish(process)
    expect(result.code == 124 and result.out.count(" saved\n") == 2, "both save the model", result)


@cases("HUP", "USR1", "USR2", "CONT")
def test_signals_that_end_nothing(name):
    """They come to the workers, again and again, and all go on."""
    process = start(RUN, "-n", 2, "-s", 0, *shell(
        'n=0; trap "n=\\$((n + 1)); echo got %s \\$n" %s; trap "exit 0" TERM; echo up; while :; do sleep 0.05; done'
        % (name, name)))
    for _ in range(2):
        process.stdout.readline()
    for number in (1, 2, 3):
        process.send_signal(getattr(signal, "SIG" + name))
        lines = [process.stdout.readline() for _ in range(2)]
        expect(all(line.endswith("got %s %d\n" % (name, number)) for line in lines), "both got it", lines)
    process.send_signal(signal.SIGTERM)
    result = finish(process)
    expect(result.code == 0, "they ended well", result)


def test_nohup():
    process = start("nohup", RUN, "-n", 1, "-s", 0, *shell("echo up; read -r line; sleep 0.2; echo done"), stdin=subprocess.PIPE)
    process.stdout.readline()
    process.send_signal(signal.SIGHUP)
    result = finish(process)
    expect(result.code == 0 and "done" in result.out, "it goes on", result)


@cases(("-s", 1), ("-s", 1, "--replicas"))
def test_stop_and_continue(*options):
    """Ctrl-Z and fg: all stop, and all go on."""
    process = start(RUN, "-n", 2, *options, helper("saver"), 0)
    for _ in range(2):
        process.stdout.readline()
    everything = [process.pid, *children(process.pid)]
    process.send_signal(signal.SIGTSTP)
    wait_until(lambda: all(state(pid) == "T" for pid in everything), lambda: [state(pid) for pid in everything])
    process.send_signal(signal.SIGCONT)
    wait_until(lambda: all(state(pid) != "T" for pid in everything), lambda: [state(pid) for pid in everything])
    process.send_signal(signal.SIGTERM)
    result = finish(process)
    expect(result.code == 0 and result.out.count(" saved\n") == 2, "it ends well", result)


def test_a_worker_that_ignores_ctrl_z_is_stopped_too():
    process = start(RUN, "-n", 1, "-s", 0, *shell('trap "" TSTP; echo up; exec sleep 600'))
    process.stdout.readline()
    (worker,) = children(process.pid)
    process.send_signal(signal.SIGTSTP)
    wait_until(lambda: state(worker) == state(process.pid) == "T", "both stop")
    for number in (signal.SIGTERM, signal.SIGCONT):
        process.send_signal(number)
    expect(finish(process).code == 128 + signal.SIGTERM, "it goes on, and ends")


@cases("INT", "TERM")
def test_signals_are_passed_on(name):
    process = start(RUN, "-n", 2, "-s", 0, *shell(
        'trap "echo got %s; exit 0" %s; echo up; while :; do sleep 0.05; done' % (name, name)))
    for _ in range(2):
        process.stdout.readline()
    process.send_signal(getattr(signal, "SIG" + name))
    result = finish(process)
    expect(result.code == 0, "they ended well", result)
    expect(result.out.count("got " + name) == 2, "both got it", result)


def test_an_interrupted_run_says_so_in_its_status():
    process = start(RUN, "-n", 2, "-s", 0, *shell("echo up; exec sleep 600"))
    process.stdout.readline()
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    result = finish(process)
    expect(result.code == 128 + signal.SIGINT, "exit status", result)


def interrupted_twice():
    """A run that has got two signals at once: the same request. None: it was killed, and the machine was so slow that the
    second signal may have come late."""
    process = start(RUN, "-n", 1, "-s", 0,
                    *shell('trap "" INT; echo up; while :; do sleep 0.05; done'))
    process.stdout.readline()
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    if process.poll() is None:
        return process
    took = time.monotonic() - began
    expect(took >= REPEAT, "one is not enough", finish(process))
    end(process)
    return None


def test_second_signal_kills():
    process = wait_until(interrupted_twice, "two signals come at once")

    def ended():
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        return process.poll() is not None

    wait_until(ended, "it is killed")
    result = finish(process)
    expect(result.code == 128 + signal.SIGINT, "exit status", result)


def test_children_die_with_their_parent():
    process = start(RUN, "-n", 2, "-s", 0, *shell("echo $$; exec sleep 600"))
    pids = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
    process.kill()
    process.communicate()
    wait_until(lambda: not any(is_alive(pid) for pid in pids), "the ranks are gone")


def test_what_a_failed_rank_started_is_ended_too():
    process = start(RUN, "-n", 1, "-s", 0, *shell("sleep 600 & echo $!; sleep 0.2; kill -KILL $$"))
    pid = int(process.stdout.readline().split()[-1])
    result = finish(process)
    expect(result.code == 128 + signal.SIGKILL, "exit status", result)
    wait_until(lambda: not is_alive(pid), "the grandchild is gone")


def test_output_held_open_does_not_hold_up_the_end():
    process = start(RUN, "-n", 1, "-s", 0, *shell("sleep 600 & echo $! last words"))
    line = process.stdout.readline()
    result = finish(process)
    send(int(line.split()[2]), signal.SIGKILL)
    expect(result.code == 0 and "last words" in line, "without waiting for what still holds the pipe", result)


def test_a_reader_that_goes_away_does_not_end_the_run():
    with tempfile.TemporaryDirectory() as folder:
        process = start(RUN, "-n", 1, "-s", 0,
                        *shell("for i in 1 2 3 4 5; do echo $i; sleep 0.1; done; "
                               "echo end > %s/end" % folder))
        process.stdout.readline()
        process.stdout.close()
        process.stdout = None
        process.wait()
        expect(os.path.exists(folder + "/end"), "the worker came to its end")


def test_environment_of_another_run_is_not_passed_down():
    environment = clean_environment(MLFAB_RANK=5, MLFAB_ROLE="server", MLFAB_LISTEN="tcp:[::1]:1")
    result = launch("-n", 1, "-s", 0, *shell('echo "$MLFAB_RANK,$MLFAB_ROLE,$MLFAB_LISTEN"'),
                    env=environment)
    expect(result.out == "[worker 0] 0,,\n", "a place of its own", result)


@cases("--tcp", "--shm", "--no-prefix")
def test_the_descriptor_neither_loses_a_wake_up_nor_burns_a_core(option):
    result = launch("-n", 1, "-s", 1, option, helper("descriptor"))
    found = re.search(r"pulls (\d+) lost (\d+) late (\d+) empty (\d+)", result.out)
    expect(result.code == 0 and found, "it ends well", result)
    pulls, lost, late, empty = map(int, found.groups())
    expect(lost == 0, "no wake-up is lost", result)
    expect(empty <= pulls, "and few come for nothing", result)


if __name__ == "__main__":
    main(globals(), jobs=8)  # most of them sleep
