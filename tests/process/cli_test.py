#!/usr/bin/env python3
"""The command line of the five tools: help, version, units, and bad input: each costs one line that names the mistake, and exit
status 2, and nothing is started."""
import os
import pty
import re
import select
import shutil
import subprocess
import tempfile
import time

from process import BUILD, RUN, cases, clean_environment, expect, launch, main, need, run, unique, wait_until

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TOOLS = {name: os.path.join(BUILD, "mlfab-" + name) for name in ("run", "plan", "sim", "top")}
TOOLS["fetch"] = os.path.join(ROOT, "tools", "mlfab-fetch")
WORDS = {"run": ["true"], "plan": [os.path.join(ROOT, "examples", "batch.txt")], "sim": [], "top": ["x.prom"], "fetch": ["mnist"]}
SIM = ["--workers", 1, "--steps", 1]


def refused(name, arguments, *texts, **more):
    """One line on stderr that begins with the tool's name and has these texts, nothing on stdout, exit status 2."""
    result = run(TOOLS[name], *arguments, **more)
    what = "mlfab-%s %s" % (name, " ".join(map(str, arguments)))
    expect(result.code == 2 and not result.out, what, result)
    expect(result.err.startswith("mlfab-%s: " % name) and result.err.count("\n") == 1, what + ": one line", result)
    for text in texts:
        expect(text in result.err, "%s: %s" % (what, text), result)


def options(name):
    return [option for option in re.findall(r"^  (?:-\w, )?(--[a-z-]+)", run(TOOLS[name], "--help").out, re.M)]


@cases(*TOOLS)
def test_help_and_version(name):
    with open(os.path.join(ROOT, "mlfab.h"), encoding="utf-8") as file:
        version = re.search(r'define MLFAB_VERSION "(.*)"', file.read())[1]
    long, short = run(TOOLS[name], "--help"), run(TOOLS[name], "-h")
    expect(long.code == 0 and long.out == short.out and not long.err, "-h and --help", long)
    expect(long.out.startswith("usage: mlfab-%s " % name) and "\n  -h, --help" in long.out and "--version" in long.out, "usage", long)
    expect(all(len(line) <= 80 and line == line.rstrip() for line in long.out.splitlines()) or name == "fetch", "80 columns", long)
    result = run(TOOLS[name], "--version")
    expect(result.code == 0 and version in result.out and result.out.count("\n") == 1, "version", result)


@cases(*TOOLS)
def test_a_wrong_letter_names_the_option(name):
    known = options(name)
    expect(len(known) >= 5, "options", known)
    for option in known:
        wrong = option[:-1] + ("q" if option[-1] != "q" else "z")
        near = [o for o in known if len(o) == len(wrong) and sum(a != b for a, b in zip(o, wrong)) == 1]
        refused(name, [wrong] + WORDS[name], wrong, "the nearest is")
        if near == [option]:
            refused(name, [wrong] + WORDS[name], "the nearest is " + option)
    refused(name, ["--quite-another-thing"] + WORDS[name], "--quite-another-thing", "--help")


def test_both_forms_of_a_value():
    for given in (["--steps=3"], ["--steps", "3"]):
        result = run(TOOLS["sim"], "--workers=1", *given, "--csv")
        expect(result.code == 0 and result.out.splitlines()[1].startswith("0,3,"), "three steps", result)
    for given in (["-n", 2], ["-n2"], ["-n=2"]):
        result = launch(*given, "-s=0", "--timeout=60s", "echo", "here")
        expect(result.code == 0 and result.out.count("here") == 2, "two workers", result)
    refused("run", ["--verbose=1", "true"], "--verbose takes no value")
    refused("run", ["-n"], "-n needs a value")
    refused("fetch", ["mnist", "--pause"], "--pause")


def test_units():
    """The same run in other units, and in the numbers without one."""
    def simulated(*arguments):
        result = run(TOOLS["sim"], "--workers", 2, "--steps", 2, *arguments)
        expect(result.code == 0, arguments, result)
        return result.out
    plain = simulated("--model-bytes", 4194304, "--rate", 125000000, "--latency", 60000, "--compute", 20000000)
    for size, rate, latency, compute in (("4MiB", "1Gbit", "60us", "20ms"), ("4096KiB", "125MB/s", "0.06ms", "0.02s"),
                                         ("4194304B", "125000kB", "60000ns", "20000us"), ("4.194304MB", "1000Mbit/s", "60k", "20m"),
                                         ("4194304", "1.25e8", "6e4", "2e7")):
        expect(simulated("--model-bytes", size, "--rate=" + rate, "--latency", latency, "--compute=" + compute) == plain,
               (size, rate, latency, compute), plain)
    with tempfile.TemporaryDirectory() as folder:
        out = []
        for text in ("0 1 125000000 125000000\n20000000 1 2000000 2000000\n", "# a trace\n0 1 1Gbit 125MB/s\n\n20ms 1 2MB 16Mbit/s\n"):
            path = os.path.join(folder, "rates")
            with open(path, "w", encoding="ascii") as file:
                file.write(text)
            out.append(simulated("--model-bytes", "1MB", "--rate", "1Gbit", "--rate", path))
        expect(out[0] == out[1], "a trace with units", out)
        for text, why in (("0 1 1Gbit\n", "3 numbers, where 4 belong"), ("0 1 1Gbit 1MBB\n", "'1MBB' is not a rate"),
                          ("0s 1 1 1 1\n", "not wanted"), ("-1 1 1 1\n", "'-1' is not a time"), ("1x 1 1 1\n", "'1x' is not a time")):
            with open(path, "w", encoding="ascii") as file:
                file.write(text)
            refused("sim", SIM + ["--rate", path], why.replace("not wanted", "is not wanted"), path + ":1")
    result = launch("-n", 1, "--timeout", "300ms", "sleep", 60)
    expect(result.code == 124 and "not finished after 0.3 s" in result.err, "a timeout in ms", result)


def test_units_in_a_plan():
    with open(WORDS["plan"][0], encoding="ascii") as file:
        text = file.read()
    text = re.sub(r"^((?:e|in)gress \d+ 1 0) 125$", r"\1 1Gbit", text, flags=re.M)
    text = re.sub(r"^(update \d+ \d+) (\S+)( .*) 100$", r"\1 \2s\3 100MB", text, flags=re.M)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "batch")
        with open(path, "w", encoding="ascii") as file:
            file.write(text)
        ours, theirs = run(TOOLS["plan"], path, "--human"), run(TOOLS["plan"], WORDS["plan"][0], "--human")
        expect(ours.code == 0 and ours.out == theirs.out and "1Gbit" in text and "100MB" in text, "the same plan", ours)
        expect("in seconds" in run(TOOLS["plan"], path, "--svg").out, "a chart with its unit")
        for old, new, why in (("1Gbit", "1Gbyte", "a rate: `1Gbyte` is not a rate"), ("100MB", "100MO", "size: `100MO` is not a size"),
                              ("0.2s", "0.2m/s", "`0.2m/s` is not a time")):
            with open(path, "w", encoding="ascii") as file:
                file.write(text.replace(old, new, 1))
            refused("plan", [path], why)
        ends = [run(TOOLS["plan"], WORDS["plan"][0], "--backlog", b).out for b in ("2", "2s", "2000ms")]
        expect(ends[0] == ends[1] == ends[2] and ends[0], "a backlog", ends)


@cases(("run", "--timeout"), ("sim", "--latency"), ("sim", "--compute"), ("sim", "--rate"), ("sim", "--model-bytes"), ("sim", "--timeout"),
       ("plan", "--backlog"), ("top", "--interval"), ("fetch", "--pause"))
def test_bad_quantities(name, option):
    for value in ("", "-1", "-5s", "5x", "5 s", "s", "MB", "5sec", "0x10", "nan", "inf", "1e999", "--", "5MiBs", "5ms5", "\n7"):
        refused(name, ["%s=%s" % (option, value)] + WORDS[name], option.lstrip("-"))
    if option != "--backlog":
        refused(name, [option, "1e300" if name != "fetch" else "61min"] + WORDS[name], option)


@cases(("run", "-n"), ("run", "--max-servers"), ("run", "--delay-bound"), ("sim", "--workers"), ("sim", "--seed"), ("top", "--count"), ("fetch", "--retries"))
def test_bad_numbers(name, option):
    for value in ("", "-1", "1.5", "x", "1s", "99999999999999999999", "1 "):
        refused(name, ["%s=%s" % (option, value)] + WORDS[name], option.lstrip("-"))
    for option, value in (("--loss", "1.5"), ("--loss", "-0.1"), ("--sync", "bps"), ("--scheduler", "")):
        refused("sim", [option, value], option)


def names_of_settings():
    lines = run(RUN, "--settings").out.splitlines()
    return [line.split()[0] for line in lines[1:lines.index("")]]


def test_settings():
    result = run(RUN, "--settings")
    names = names_of_settings()
    expect(result.code == 0 and len(names) > 50 and len(set(names)) == len(names), "names", result)
    for line in (r"timeout_ms +300000ms +\S.*; a time from 1ms to 24h \(ns, us, ms, s, min, h\)", r"optimizer +sgd +\S.*; one of: sgd momentum .*",
                 r"seed +1 +\S.*; a whole number in 1\.\.\d+", r"job +mlfab +\S.*; a text", r"beta2 +0\.999 .*; a number from 0 to 1"):
        expect(re.search("^%s$" % line, result.out, re.M), line, result)
    expect(not re.search(r"^\S+ *$|  ;|; *$", result.out.split("\n\n")[0], re.M), "each has a default, a meaning and values", result)


def test_a_wrong_letter_names_the_setting():
    for name in names_of_settings():
        wrong = name[:-1] + ("q" if name[-1] != "q" else "z")
        refused("run", ["-n", 1, "--set", wrong + "=1", "true"], wrong, "the nearest is" if len(name) > 2 else "")
    refused("run", ["-n", 1, "--set", "quite_another_thing=1", "true"], "--settings")


def test_bad_settings():
    for setting in ("timeout_ms=", "timeout_ms=-1", "timeout_ms=5x", "timeout_ms=1.5", "timeout_ms=25h", "timeout_ms=999us", "metrics_ms=9ms",
                    "seed=99999999999999999999", "workers=2s", "filter_top=0.5x", "optimizer=", "div_max=1e999", "log=loud" * 60):
        refused("run", ["-n", 1, "--set", setting, "true"], setting.split("=")[0])
    result = launch("-n", 1, "-s", 0, "--set", "timeout_ms=2s", "sh", "-c", "echo $MLFAB_TIMEOUT_MS")
    expect(result.code == 0 and "2s" in result.out, "as it is", result)
    with tempfile.TemporaryDirectory() as folder:
        for name, value in (("MLFAB_TIMEOUT_MS", "5x"), ("MLFAB_OPTIMIZER", "best"), ("MLFAB_METRICS", folder)):
            refused("run", ["-n", 1, "touch", folder + "/started"], name, value, env=clean_environment(**{name: value}))
            expect(not os.path.exists(folder + "/started"), "nothing is started")


def test_directories_and_files():
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "file")
        with open(file, "w", encoding="ascii") as made:
            made.write("x\n")
        started = ["touch", os.path.join(folder, "started")]
        for setting in ("metrics=%s", "trace=%s", "log=info:%s", "key_file=%s"):
            refused("run", ["-n", 1, "--set", setting % folder] + started, folder, "directory")
        for setting in ("checkpoint_dir=%s", "vote_dir=%s"):
            refused("run", ["-n", 1, "--set", setting % file] + started, file, "not a directory")
        refused("run", ["-n", 1, "--resume", file] + started, "not a directory")
        refused("run", ["-n", 1, "--server", folder] + started, folder, "directory")
        refused("run", ["-n", 1, folder], folder, "directory")
        refused("plan", [folder], folder, "directory")
        refused("plan", WORDS["plan"] + ["--svg=" + folder], folder, "directory")
        refused("sim", SIM + ["--rate", folder], folder, "directory")
        refused("sim", SIM + ["--compute", folder], folder, "directory")
        refused("sim", SIM + ["--compute", folder + "/nothing"], folder, "and no file")
        refused("top", [folder, "--count", 1], folder, "directory")
        refused("fetch", ["mnist", "--to", file], file, "not a folder")
        refused("fetch", ["x", "--from", "y", "--list", folder], folder, "directory")
        expect(sorted(os.listdir(folder)) == ["file"], "nothing is started", os.listdir(folder))


# ---- man pages and completion

def test_man_pages():
    for name, tool in TOOLS.items():
        page = run("python3", os.path.join(ROOT, "tools", "man.py"), tool, "9.8.7")
        expect(page.code == 0, name, page)
        text = page.out.replace("\\-", "-")
        expect(text.startswith('.TH MLFAB-%s 1 "" "mlfab 9.8.7"\n.SH NAME\nmlfab-%s - ' % (name.upper(), name)), name, page)
        for option in options(name):
            expect(re.search(r"^\.B (-\w, )?%s\b" % option, text, re.M), option, page)
        if name != "fetch":
            expect(re.search(r"^\.SH (EXIT STATUS|COLUMNS)$", text, re.M), "the texts behind the options", page)
        if shutil.which("groff"):
            shown = subprocess.run(["groff", "-man", "-Tascii", "-ww", "-P-c"], input=page.out, capture_output=True, text=True, check=True)
            expect(not shown.stderr and "OPTIONS" in re.sub(".\b", "", shown.stdout), name, shown.stderr)


def completed(*words):
    """What bash offers for the last of these words."""
    script = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); compopt() { :; }; _mlfab "$1" "${@: -1}"; echo "${COMPREPLY[@]}"'
    need("bash")
    result = run("bash", "-c", script, "bash", os.path.join(ROOT, "tools", "mlfab.bash"), *words)
    expect(result.code == 0 and not result.err, words, result)
    return result.out.split()


def test_completion():
    for name, tool in TOOLS.items():
        expect(sorted(completed(tool, "--")) == sorted(options(name)), name, completed(tool, "--"))
    expect(completed(TOOLS["run"], "--on-f") == ["--on-failure"], "an option")
    for words in (["--on-failure", ""], ["--on-failure", "="], ["--on-failure", "=", ""]):
        expect(completed(TOOLS["run"], *words) == ["end", "continue", "restart"], words)
    expect(completed(TOOLS["run"], "--on-failure", "=", "c") == ["continue"], "a word")
    expect(completed(TOOLS["run"], "--set", "time") == ["timeout_ms="], "a setting")
    expect(completed(TOOLS["sim"], "--sync", "b") == ["bsp"] and completed(TOOLS["sim"], "--rate", "") == [], "sim")
    expect(completed(TOOLS["plan"], "no") == [], "files are bash's")


def test_completion_by_tab():
    need("bash")
    controller, terminal = pty.openpty()
    shell = subprocess.Popen(["bash", "--norc", "--noprofile", "-i"], stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
                             env=clean_environment(TERM="dumb", PS1="$ ", PATH=BUILD + ":" + os.environ["PATH"]))
    os.close(terminal)
    shown = [b""]

    def seen(text):
        if select.select([controller], [], [], 0.1)[0]:
            shown[0] += os.read(controller, 65536)
        return text in shown[0]
    try:
        os.write(controller, b"source %s/tools/mlfab.bash; echo rea''dy\n" % ROOT.encode())
        wait_until(lambda: seen(b"ready\r\n"), lambda: shown)
        os.write(controller, b"mlfab-run --on-f\t")
        wait_until(lambda: seen(b"mlfab-run --on-failure "), lambda: shown)
    finally:
        shell.kill()
        shell.wait()
        os.close(controller)


# ---- mlfab-top

def metrics_files(folder, steps):
    """Files of workers that have made so many steps in 10 s, on another host."""
    now = time.time()
    for rank, made in enumerate(steps):
        with open(os.path.join(folder, "m.worker-%d.prom" % rank), "w", encoding="ascii") as file:
            file.write('mlfab_node_info{role="worker",rank="%d",fabric="training",host="elsewhere",pid="1"} 1\nmlfab_opened_timestamp_seconds %f\n'
                       'mlfab_written_timestamp_seconds %f\nmlfab_state 1\nmlfab_iterations_total %d\n# EOF\n'
                       % (rank, now + 990, now + 1000, made))
    return os.path.join(folder, "m.*.prom")


def test_top_marks_the_slowest():
    for steps, slow in (((100, 50, 100), 1), ((100, 97, 99), None), ((30, 31, 10), 2), ((5,), None), ((0, 0), None)):
        with tempfile.TemporaryDirectory() as folder:
            result = run(TOOLS["top"], "--count", 1, metrics_files(folder, steps))
            marked = re.findall(r"^worker (\d) +slowest ", result.out, re.M)
            expect(result.code == 0 and marked == ([] if slow is None else [str(slow)]), steps, result)
    with tempfile.TemporaryDirectory() as folder:  # those who wait make no steps either
        pattern = metrics_files(folder, (100, 99, 50))
        for rank in (0, 2):
            path = os.path.join(folder, "m.worker-%d.prom" % rank)
            with open(path, encoding="ascii") as file:
                text = file.read()
            with open(path, "w", encoding="ascii") as file:
                file.write(text.replace("# EOF", 'mlfab_waits_seconds{call="pull",for="worker",peer="1"} 2.5\n# EOF'))
        result = run(TOOLS["top"], "--count", 1, pattern)
        expect(re.findall(r"^worker (\d) +slowest ", result.out, re.M) == ["1"], "whom they wait for", result)


def test_top_in_a_narrow_terminal():
    """40 columns: each line fits, the columns are explained, q ends it. NO_COLOR: no colours. TERM=dumb: lines."""
    need("tmux")
    socket = unique("tmux")

    def tmux(*arguments):
        return run("tmux", "-L", socket, "-f", "/dev/null", *arguments)

    def screen(*more):
        return tmux("capture-pane", "-p", *more).out
    with tempfile.TemporaryDirectory() as folder:
        command = "%s --interval 100ms '%s'" % (TOOLS["top"], metrics_files(folder, (100, 50, 100)))
        try:
            for variable in ("COLOUR=1", "NO_COLOR=1"):
                tmux("new-session", "-d", "-x", "40", "-y", "16", "env %s %s" % (variable, command))
                wait_until(lambda: "q: quit  ?: the columns" in screen(), screen)
                lines = screen().splitlines()
                expect(lines[1] == "NODE         STATE        STEP   STEPS/S" and lines[3] == "worker 1     slowest        50       5.0", "columns", lines)
                expect(len([line for line in lines if line.strip()]) == 6, "no line is broken", lines)
                expect(("\033[33m" in screen("-e")) == (variable == "COLOUR=1"), "colours", screen("-e"))
                expect(not re.search(r"\033\[[0-9;]*[37]", screen("-e")) or variable == "COLOUR=1", "none", screen("-e"))
                tmux("send-keys", "?")
                wait_until(lambda: "slowest: the worker that the others wait for" in " ".join(screen().split()) and "any key: back" in screen(), screen)
                tmux("send-keys", "x")
                wait_until(lambda: "worker 2" in screen(), screen)
                tmux("send-keys", "q")
                wait_until(lambda: tmux("list-sessions").code != 0, "q ends it")
            tmux("new-session", "-d", "-x", "120", "-y", "16", "env TERM=dumb %s --count 2; sleep 60" % command)
            wait_until(lambda: screen().count("worker 2") == 2, screen)
        finally:
            tmux("kill-server")


if __name__ == "__main__":
    main(globals())
