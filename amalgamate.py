#!/usr/bin/env python3
"""Joins core/ and transports/ into mlfab.c, the one source file that users copy, and mlfab_sim.c, the simulator.

    amalgamate.py            writes mlfab.c
    amalgamate.py --check    compares instead: exit 1 if mlfab.c differs from the generated text, or a profile is longer
                             than its ceiling
    amalgamate.py --simulator FILE   writes mlfab_sim.c
    amalgamate.py --graph    prints the groups and their includes and calls, as Graphviz text
    amalgamate.py --breaches lists the violations of the order of groups
    amalgamate.py --profile minimal|coll|core -o DIR
                             writes a smaller mlfab.c, and the headers that it needs, to DIR: see PROFILES

A folder of core/ is a group. GROUPS below is the only definition of the order: floors of groups, lowest
first, and the modules of each group. A file includes and calls files of its own group and of lower floors.
The script fails when the list and the folders differ. It counts includes and calls that go up or across,
and circles of files, and fails when their number differs from BREACHES.
The output consists of the files' own text, with each local header where it is first used.
"""
import functools
import os
import re
import sys
import textwrap

# One floor per row: group -> its modules. A module is a header, a source file, or both.
GROUPS = [
    {"base": "base error text typed env system rng random heap map pool request meter shm_memory shm_coll"},
    {"wire": "wire codec peer_wire kept_wire crc"},
    {"kernels": "kernels_x86 kernels_cblas kernels half_x86 half kernels_combine kernels_combine_x86 packet"},
    {"model": "options sync layout balance optimizer memory store hold image windows"},
    {"node": "port role node tap link files outbox claim peer_link inner mirrored growth server_link caller scheduler_link bootstrap copies peers alive"},
    {"worker": "sources pull push feed worker",
     "server": "lazy blocks clock queue apply round clock_copy serve server server_role",
     "coll": "coll_wire dag algorithm partial graph notify stream barrier barrier_kept comm_base engine plain_check plain comm_object "
             "comm_finish epoch comm attend membership membership_records partial_run stochastic user_dag trees trees_role comm_role"},
    {"sched": "sched_wire network order group distribute plan monitor items batch arrange scheduler explain hops accumulator sum distributor aggregator report route spread client sched_role",
     "sparse": "version filter cache sparse_push sparse_apply delta",
     "lend": "lend_wire slab view views",
     "reshard": "reshard_wire reshard reshard_server recut reshard_worker reshard_role",
     "keys": "blake2b poly1305 keys_wire session guard",
     "checkpoint": "checkpoint_wire state record moment writer lead reader restore collect checkpoint checkpoint_worker"},
    {"device": "resident",
     "replica": "divergence vote keeper replica_wire voter votes mirror mirror_role copy losses witness",
     "telemetry": "metrics trace chrome"},
    {"api": "complete parts key_source config calls extent visit calling context disk telemetry memory submit calls_push shared calls_coll calls_partial calls_stochastic calls_dag calls_sched "
            "calls_sparse calls_reshard calls_checkpoint calls_lend safetensors direct_table staging direct"},
]
# The next floor. The files of a transport begin with its name. A transport includes mlfab_transport.h and the groups
# `base`, `wire` and `kernels`, and no other transport.
TRANSPORTS = "tcp tcp_measure shm_file shm_memory shm_link shm_lend shm shm_coll mpi sim"
TRANSPORT_FLOORS = 3
# The top floor, which alone knows all transports: the list of transports, and the functions that open a context.
TOP = {"open": "build_info areas dirs compose join open"}
# The simulator is a separate file, made of this transport and of the files of `base` that it includes. All
# other files are in mlfab.c.
SIMULATOR = "transports/sim"

# Optional parts: MLFAB_WITH_<name> -> a description, and the folders and modules. The script puts their text
# between `#if MLFAB_WITH_<name>` and `#endif`. If a switch is off, the public functions return UNSUPPORTED and name
# the switch: see stubs. Only the files that compose (TOP) and other optional groups may call into an optional part;
# the compiler checks that when a switch is off.
SWITCHES = {
    "PUSH": ("pushes and pulls", "core/model core/worker core/server core/api/calls_push"),
    "SCHED": ("scheduling", "core/sched core/node/scheduler_link core/api/calls_sched core/base/meter transports/tcp_measure"),
    "SPARSE": ("filters and sparse updates", "core/sparse core/api/calls_sparse"),
    "RESHARD": ("moving slices", "core/reshard core/model/balance core/api/calls_reshard"),
    "GROWTH": ("growth", "core/node/growth core/open/join"),
    "REPLICA": ("replicas of servers", "core/replica core/node/copies core/node/peers core/coll/barrier_kept core/wire/kept_wire"),
    "KEYS": ("keys", "core/keys core/api/key_source"),
    "CHECKPOINT": ("checkpoints", "core/checkpoint core/node/files core/open/dirs core/api/calls_checkpoint core/api/safetensors"),
    "DEVICE": ("device memory", "core/device core/worker/feed core/api/visit core/api/staging"),
    "TELEMETRY": ("telemetry", "core/telemetry core/api/telemetry"),
    "COLL": ("collectives", "core/coll core/api/calls_coll core/api/shared core/base/pool core/base/shm_coll transports/shm_coll core/kernels/kernels_combine core/kernels/kernels_combine_x86"),
    "PARTIAL": ("partial collectives", "core/coll/partial core/coll/partial_run core/api/calls_partial"),
    "STOCHASTIC": ("stochastic reductions",
                   "core/coll/graph core/coll/notify core/coll/stochastic core/api/calls_stochastic"),
    "DAG": ("task graphs of the user's own", "core/coll/user_dag core/api/calls_dag"),
    "MPI": ("the transport over MPI", "transports/mpi"),
    "CBLAS": ("kernels of cblas", "core/kernels/kernels_cblas"),
    "LEND": ("views and shared areas", "core/lend core/api/calls_lend transports/shm_lend"),
}
# Modules that are always there, or that several switches need, whatever their folder.
ALWAYS = ["core/coll/barrier", "core/model/options"]
NEEDED_BY = {"core/api/direct_table": ["COLL", "DEVICE"], "core/base/random": ["COLL", "SCHED"], "core/kernels/packet": ["SCHED", "SPARSE"],
             "core/kernels/half": ["SCHED", "SPARSE", "COLL"], "core/kernels/half_x86": ["SCHED", "SPARSE", "COLL"],
             "core/model/image": ["CHECKPOINT", "REPLICA", "RESHARD"], "core/server/clock_copy": ["CHECKPOINT", "REPLICA", "RESHARD"],
             "core/api/disk": ["CHECKPOINT", "TELEMETRY"], "core/api/extent": ["COLL", "DEVICE", "SPARSE"],
             "core/base/shm_memory": ["LEND", "COLL"], "transports/shm_memory": ["LEND", "COLL"], "core/open/areas": ["LEND", "COLL"],
             "core/node/tap": ["SCHED", "TELEMETRY"], "core/node/mirrored": ["REPLICA", "COLL", "SCHED"],
             "core/model/hold": ["CHECKPOINT", "REPLICA"],
             "core/checkpoint/state": ["CHECKPOINT", "REPLICA"], "core/checkpoint/moment": ["CHECKPOINT", "REPLICA"],
             "core/checkpoint/reader": ["CHECKPOINT", "REPLICA"], "core/checkpoint/collect": ["REPLICA"],
             "core/node/peer_link": ["SCHED", "COLL"], "core/wire/peer_wire": ["SCHED", "COLL"]}
# Modules that are there if all of these switches are on; "!": if it is off.
NEEDS = {"core/replica/votes": ["REPLICA", "CHECKPOINT"], "core/coll/attend": ["!PUSH"], "core/api/direct": ["COLL", "DEVICE"],
         "core/coll/trees": ["COLL", "SCHED"], "core/coll/trees_role": ["COLL", "SCHED"]}
# A smaller mlfab.c: the switches that it contains. The text of the others is removed.
PROFILES = {"minimal": ["PUSH", "KEYS"], "coll": ["COLL", "MPI"], "core": ["PUSH", "SCHED", "SPARSE", "KEYS", "REPLICA"]}
# Members that only a room sets: (one of these switches, struct, members). A profile without the switches loses
# the members, and all branches that ask for them: see tools/absent.py. "!": a setting decides the member, and a build without the
# switch refuses that setting.
MEMBERS = [
    ("SPARSE", "mlfab__worker", "sparse packets cache"), ("SPARSE", "mlfab__fetch", "cache"),
    ("SPARSE", "mlfab__server", "sparse came watch"), ("SPARSE", "mlfab__server_pull", "since"),
    ("SPARSE", "mlfab__store", "tags"), ("SPARSE", "mlfab__block", "shadow"),
    ("SCHED", "mlfab__worker", "routes"), ("SCHED", "mlfab__part", "planned!"), ("SCHED", "mlfab__server", "policy sched scheduled!"),
    ("SCHED", "mlfab__incoming", "group announced unplaced! waits aggregator_rate shape own_bytes all_released"),
    ("SPARSE", "mlfab__incoming", "packed_end"),
    ("SCHED", "mlfab__server_pull", "expect_ns chunk place spread attempt"), ("SCHED COLL", "mlfab_node", "between"),
    ("RESHARD", "mlfab__worker", "mover moving"), ("RESHARD", "mlfab__server_move", "hooks"),
    ("GROWTH", "mlfab_node", "growth growing"), ("GROWTH", "mlfab__peer", "leaves offered_to"),
    ("REPLICA", "mlfab__worker", "copies"), ("REPLICA", "mlfab__server", "keeper keeping asleep"), ("REPLICA", "mlfab__place", "moved"),
    ("REPLICA", "mlfab_node", "copies replica voter_links"),
    ("CHECKPOINT", "mlfab__worker", "restores"), ("CHECKPOINT", "mlfab__parts", "checkpoint"),
    ("CHECKPOINT", "mlfab__server_save", "checkpoint"), ("CHECKPOINT REPLICA", "mlfab__server_save", "hooks"),
    ("CHECKPOINT REPLICA", "mlfab__store", "holders own"), ("CHECKPOINT", "mlfab_node", "files filers"),
    ("CHECKPOINT TELEMETRY", "mlfab", "disk"), ("TELEMETRY", "mlfab", "telemetry"), ("TELEMETRY SCHED", "mlfab_node", "tap"),
    ("LEND", "mlfab__worker", "viewer views"), ("LEND", "mlfab__fetch", "view"), ("LEND", "mlfab__server", "lender lending slab"),
    ("LEND", "mlfab__server_pull", "view"),
    ("DEVICE", "mlfab__worker", "lacks lacks_end"), ("DEVICE", "mlfab__outgoing", "lacks lacks_end stalled"),
    ("DEVICE", "mlfab__fetch", "arrives arrives_fn arrives_user"), ("DEVICE", "mlfab__server", "memory window"),
    ("DEVICE", "mlfab", "stager staging shares"), ("COLL DEVICE", "mlfab", "direct direct_close"), ("DEVICE COLL", "mlfab__call_in", "visit forgone"),
    ("DEVICE", "mlfab__store", "memory"), ("LEND", "mlfab__store", "slab"), ("LEND", "shm", "lend lender"), ("LEND", "shm_slot", "seen"),
    ("LEND", "shm_link", "refers"),
    ("COLL", "mlfab", "sharing! shm_coll! arena arena_tried! arena_runs"), ("COLL LEND", "mlfab", "areas! memory"),
    ("CHECKPOINT TELEMETRY", "mlfab", "files!"), ("TELEMETRY", "mlfab", "observer!"), ("COLL", "mlfab__parts", "comm"),
]
# The most lines of the whole and of each profile. A ceiling only falls, in the commit that makes the lines fall. A feature that
# needs room makes that room first.
CEILINGS = {"": 72892, "core": 43834, "coll": 27169, "minimal": 23678}

# Violations of the order, whose number may only fall: includes and calls between groups that go up or across, and
# files on a circle.
BREACHES = {"up": 0, "circle": 0}

ROOT = os.path.dirname(os.path.abspath(__file__))
PUBLIC_HEADERS = "mlfab.h", "mlfab_sim.h"
# Headers for experts, lowest first. A user copies one only to include it: the output has their declarations, without the
# comments, so mlfab.c compiles beside mlfab.h alone.
EXPERT_HEADERS = ["mlfab_transport.h", "mlfab_partial.h", "mlfab_device.h", "mlfab_node.h"]

LIBRARY_TITLE = """\
/*
 * mlfab.c - the communication layer of a distributed trainer, in two files. Version {version}.
 *
 * GENERATED by amalgamate.py from core/ and transports/: change those, then run `make amalgamate`.
 * mlfab.h is the manual. To use it, copy both files into your project and compile this one:
 *
 *    cc -O2 -c mlfab.c        and link with -lpthread -lm
 *
{switches} *
"""
SWITCHES_TITLE = """\
 * Define as 0 what is to be left out: MLFAB_WITH_TCP, _SHM (transports), _PUSH (models, pushes and pulls), _COLL
 * (collectives; with it _PARTIAL, _STOCHASTIC, _DAG, which can go alone), _SCHED (scheduling), _SPARSE (filters),
 * _GROWTH (processes that join later), _RESHARD (moving slices; needs _GROWTH), _KEYS (authenticated links), _CHECKPOINT, _REPLICA
 * (replicas of servers; needs _SCHED), _DEVICE (device memory), _TELEMETRY, _LEND (views and shared areas). An absent
 * function returns MLFAB_ERR_UNSUPPORTED. `amalgamate.py --profile minimal|coll|core` writes a shorter file. Define
 * MLFAB_WITH_MPI as 1, and compile with mpicc, for the transport over MPI.
"""
SIMULATOR_TITLE = """\
/*
 * mlfab_sim.c - the simulator of mlfab, beside mlfab.c. Version {version}.
 *
 * GENERATED by amalgamate.py from transports/sim.c and core/base/: change those, then run `make amalgamate`.
 * mlfab_sim.h is the manual. To use it, compile this file and mlfab.c:
 *
 *    cc -O2 -c mlfab.c mlfab_sim.c        and link with -lpthread -lm
 *
"""
PROLOGUE = """\
 * SPDX-License-Identifier: MIT
 *
{licence}
 */

/* Linux and POSIX declarations under -std=c11; before the first system header. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif

/* Everything but the functions of {header} stays inside this file. Which internals are used depends
 * on what is compiled in, so the others must not be warned about. */
#if defined(__GNUC__) || defined(__clang__)
#define MLFAB__INTERNAL static __attribute__((unused))
#else
#define MLFAB__INTERNAL static
#endif
"""

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', re.M)
CONDITION = re.compile(r"^[ \t]*#[ \t]*(if|ifdef|ifndef|endif)\b")
GUARD = re.compile(r"^#ifndef (MLFAB__\w+_H)\n#define \1\n", re.M)
GUARD_END = re.compile(r"\n#endif[^\n]*\n*\Z")

problems, reductions = [], {}


def problem(text):
    problems.append(text)


@functools.lru_cache(maxsize=None)
def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return file.read()


class Part:
    """One file: its group, the group's floor, and its module's position in the order."""

    def __init__(self, path, group, floor, position):
        self.path, self.group, self.floor, self.position = path, group, floor, position
        self.module = path.rsplit(".", 1)[0]
        # One of these switches has to be on, all of `needs`; empty lists: the file is always there.
        self.needs = NEEDS.get(self.module, [])
        self.switches = self.needs or NEEDED_BY.get(self.module, [])
        homes = {home: name for name, (_, places) in SWITCHES.items() for home in places.split()}
        for home in (self.module, os.path.dirname(path)):
            if home in homes and not self.switches and self.module not in ALWAYS:
                self.switches = [homes[home]]

    def condition(self):
        return (" && " if self.needs else " || ").join(
            "!" * name.count("!") + "MLFAB_WITH_" + name.strip("!") for name in self.switches)

    def left_out(self, on):
        """Is it left out of a profile with these switches?"""
        held = [name.strip("!") in on if name[0] != "!" else name[1:] not in on for name in self.switches]
        return bool(held) and not (all(held) if self.needs else any(held))


def list_parts():
    """All files by path, in order. Reports a problem when the list and the folders differ."""
    parts = {}
    rows = [(group, "core/" + group, floor, modules.split())
            for floor, groups in enumerate(GROUPS) for group, modules in groups.items()]
    rows.append(("transports", "transports", len(GROUPS), TRANSPORTS.split()))
    rows += [(group, "core/" + group, len(GROUPS) + 1, modules.split()) for group, modules in TOP.items()]
    for group, folder, floor, modules in rows:
        for module in modules:
            paths = [folder + "/" + module + end for end in (".h", ".c")]
            found = [path for path in paths if os.path.exists(os.path.join(ROOT, path))]
            if not found:
                problem("%s/%s is in the list of amalgamate.py, but there is no such file" % (folder, module))
            for path in found:
                parts[path] = Part(path, group, floor, len(parts))
            if found == paths[:1] and module not in TRANSPORTS.split():
                # A header without a source file declares no functions, unless it belongs to a transport.
                if "MLFAB__INTERNAL" in re.sub(r"/\*.*?\*/|#.*", "", read(paths[0]), flags=re.S):
                    problem("%s declares functions, but there is no %s" % tuple(paths))
    for folder in ["core"] + [row[1] for row in rows]:
        for name in sorted(os.listdir(os.path.join(ROOT, folder))):
            if name.endswith((".c", ".h")) and name[0] != "." and folder + "/" + name not in parts:
                problem("%s/%s is not in the list of amalgamate.py" % (folder, name))
    return parts


# ---- includes and calls

def family(part):
    """The transport that a file belongs to."""
    return part.module.split("/")[-1].split("_")[0]


def may_use(part, target):
    """None, or why `part` may not include or call `target`."""
    if part.group == target.group == "transports":
        return None if family(target) == family(part) else "another transport"
    if part.group == "transports":
        return None if target.floor < TRANSPORT_FLOORS else "a transport uses mlfab.h and the lowest floors only"
    if target.group == part.group:
        return None
    return None if target.floor < part.floor else "`%s` is not below `%s`" % (target.group, part.group)


COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"", re.S)
DEFINED = re.compile(r"^(?!static|#|typedef)[A-Za-z][^;{}()]*?\b(mlfab_\w+)\([^;{}]*\)\s*\{", re.M)


def uses_of(parts):
    """(path, path that it includes or calls) -> the first such include or call."""
    texts = {path: COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), read(path)) for path in parts}
    home = {name: path for path in parts if path.endswith(".c") for name in DEFINED.findall(texts[path])}
    uses = {}
    for path in parts:
        for target in re.findall(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', read(path), re.M):
            target = os.path.normpath(os.path.join(os.path.dirname(path), target))
            uses.setdefault((path, target), "includes " + target)
        if path.endswith(".c"):
            for name in re.findall(r"\bmlfab_\w+(?=\()", texts[path]):
                if home.get(name, path) != path and not (parts[path].group == "transports" and "__" not in name):
                    uses.setdefault((path, home[name]), "calls " + name)
    return {use: how for use, how in uses.items() if use[1] in parts}


def circles(parts, uses):
    """The sets of files that use each other, directly or not (Tarjan's strongly connected components)."""
    after = {path: [] for path in parts}
    for path, target in uses:
        after[path].append(target)
    index, low, stack, found = {}, {}, [], []

    def visit(path):
        index[path] = low[path] = len(index)
        stack.append(path)
        for target in after[path]:
            if target not in index:
                visit(target)
            if target in stack:
                low[path] = min(low[path], low[target])
        if low[path] == index[path]:
            at = stack.index(path)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for path in parts:
        if path not in index:
            visit(path)
    return found


def judge(parts, verbose):
    """Counts the violations of the order, and compares them with BREACHES."""
    uses = uses_of(parts)
    up = ["%s: %s: %s" % (path, how, may_use(parts[path], parts[target]))
          for (path, target), how in uses.items() if may_use(parts[path], parts[target])]
    rings = circles(parts, uses)
    counted = {"up": len(up), "circle": sum(len(ring) for ring in rings)}
    if verbose:
        print("\n".join(up + ["a circle: " + " ".join(ring) for ring in rings]))
    for name, count in counted.items():
        if count != BREACHES[name]:
            problem("BREACHES[%r] is %d, but should be %d (`--breaches` lists them)" % (name, BREACHES[name], count))


def graph(parts):
    """Prints the groups as Graphviz text, with an arrow to each group that a group uses; red: not below it."""
    print("digraph mlfab {\n  rankdir=BT;\n  node [shape=box];")
    arrows = {}
    for path, target in uses_of(parts):
        pair = parts[path].group, parts[target].group
        if pair[0] != pair[1]:
            arrows[pair] = arrows.get(pair, 0) + (may_use(parts[path], parts[target]) is not None)
    for floor in GROUPS + [{"transports": TRANSPORTS}, TOP]:
        print("  { rank=same; %s }" % " ".join('"%s";' % group for group in floor))
    for (one, other), breaches in sorted(arrows.items()):
        print('  "%s" -> "%s"%s;' % (one, other, ' [color=red, label="%d"]' % breaches if breaches else ""))
    print("}")


def simulator_parts(parts):
    """The simulator's file and those that it needs: the headers that it includes, and their source files."""
    needed, todo = {}, [SIMULATOR + ".c"]
    while todo:
        path = todo.pop()
        if path in needed or path not in parts:
            continue
        needed[path] = parts[path]
        if parts[path].group != "base" and parts[path].module != SIMULATOR:
            problem("%s: the simulator uses mlfab.h and `base` only" % path)
        todo.append(parts[path].module + ".c")
        todo += [os.path.normpath(os.path.join(os.path.dirname(path), include))
                 for include in INCLUDE.findall(read(path))]
    return needed


PUBLIC = re.compile(r"^(?:MLFAB_API )?(int) (mlfab_(?!_)\w+)\(([^)]*)\) \{", re.M)
TABLE = re.compile(r"^MLFAB_API (const \w+ \*mlfab_\w+\(void\)) \{", re.M)
HOOKS = re.compile(r"^MLFAB__INTERNAL (const \w+ \*mlfab__\w+_table\(void\)) \{", re.M)
BEGINS = re.compile(r"^MLFAB__INTERNAL (int) (mlfab__(?:calls|tcp)_\w+)\(([^)]*)\) \{", re.M)


STUBS = """\
/* A function of an absent part returns UNSUPPORTED. Its error text, if it has one, names the switch. */
#if defined(__GNUC__) || defined(__clang__)
#pragma GCC diagnostic ignored "-Wunused-parameter"
#endif
#define ABSENT(name, result, ...) MLFAB_API int name(__VA_ARGS__) { return result; }
#define ABSENT_CTX(name, text, ...) \\
  ABSENT(name, mlfab__context_without(ctx, text), mlfab *ctx, __VA_ARGS__)
#define ABSENT_NODE(name, text, ...) \\
  ABSENT(name, mlfab__node_without(node, text), mlfab_node *node, __VA_ARGS__)
#define ABSENT_ERROR(name, text, ...) ABSENT(name, mlfab__error_without(error_p, text), __VA_ARGS__)
#define ABSENT_MUTE(name, text, ...) ABSENT(name, MLFAB_ERR_UNSUPPORTED, __VA_ARGS__)
#define ABSENT_CALL(name, text) \\
  MLFAB__INTERNAL int name(const mlfab__call_in *in) { return mlfab__error_without(in->error, text); }
#define ABSENT_OWN(name, ...) MLFAB__INTERNAL int name(__VA_ARGS__) { return MLFAB_ERR_UNSUPPORTED; }
#define ABSENT_TABLE(declaration) declaration { return NULL; }
"""


def wrap(text, between):
    """Lines of at most 128 characters, broken between words that `between` separates."""
    lines = textwrap.wrap(text.replace(" ", "\0").replace(between.replace(" ", "\0"), between), 128,
                          subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]


@functools.lru_cache(maxsize=None)
def declared(path, pattern):
    """The functions of a file that match a pattern."""
    return pattern.findall(read(path))


def stub(name, arguments, text):
    """The line of a function of a part that was left out."""
    arguments = re.sub(r"\s+", " ", arguments)
    for kind, first in (("CTX", "mlfab *ctx, "), ("NODE", "mlfab_node *node, ")):
        if arguments.startswith(first):
            return "ABSENT_%s(%s, %s, %s)" % (kind, name, text, arguments[len(first):])
    if "mlfab__call_in" in arguments:
        return "ABSENT_CALL(%s, %s)" % (name, text)
    if name.startswith("mlfab__"):
        return "ABSENT_OWN(%s, %s)" % (name, arguments)
    kind = "ERROR" if arguments.endswith("*error_p") else "MUTE"
    return "ABSENT_%s(%s, %s, %s)" % (kind, name, text, arguments)


def stays(profile):
    """The switches that are on in every build of a profile: it has no part that stands for one of them."""
    return {need[1:] for needs in NEEDS.values() for need in needs if need[0] == "!"} & set(PROFILES.get(profile, []))


def replaced(parts, profile):
    """The functions that a name stands for while it is off: rows (name, condition, parts)."""
    files = [part for part in parts.values() if part.path.endswith(".c")]
    rows = [(name, "!MLFAB_WITH_" + name, [part for part in files if part.switches == [name] and not part.needs])
            for name in SWITCHES if name not in stays(profile)]
    for part in files:
        for i, name in enumerate(part.needs):
            if name in SWITCHES:
                rows.append((name, " && ".join(["!MLFAB_WITH_" + name] + ["MLFAB_WITH_" + n for n in part.needs[:i]]),
                             [part]))
    return rows


def stubs(parts, profile):
    """The functions that replace those of each switch while it is off."""
    text, named = [], set()
    for name, condition, absent in replaced(parts, profile):
        functions = []
        for part in absent:
            for pattern in (PUBLIC, BEGINS):
                functions += [stub(function, arguments, "NO_" + name)
                              for _, function, arguments in declared(part.path, pattern)]
            for pattern, prefix in ((TABLE, "MLFAB_API"), (HOOKS, "MLFAB__INTERNAL")):
                functions += ["ABSENT_TABLE(%s %s)" % (prefix, function)
                              for function in sorted(set(declared(part.path, pattern)))]
        if functions:
            lines = [line for function in functions for line in wrap(function, ", ")]
            if any("NO_" + name in function for function in functions) and name not in named:
                named.add(name)
                text.append('\n#define NO_%s "%s (MLFAB_WITH_%s is 0)"' % (name, SWITCHES[name][0], name))
            off = profile and name not in PROFILES[profile] and condition == "!MLFAB_WITH_" + name
            text.append("\n%s\n" % "\n".join(lines if off else ["#if " + condition] + lines + ["#endif"]))
    return "\n%s\n%s%s" % (title_line("absent parts"), STUBS, "".join(text))


UNUSED = """
/* An argument that only an absent group reads. */
#if defined(__GNUC__) || defined(__clang__)
#pragma GCC diagnostic ignored "-Wunused-parameter"
#endif
"""


def profile_prologue(profile):
    """Turns off the switches that a smaller file does not contain."""
    absent = ["MLFAB_WITH_" + name for name in SWITCHES if name not in PROFILES[profile]]
    needed = ["MLFAB_WITH_" + name for name in sorted(stays(profile))]
    asked = wrap(" || ".join(["(defined(%s) && %s + 0)" % (name, name) for name in absent] +
                             ["(defined(%s) && !(%s + 0))" % (name, name) for name in needed]), " || ")
    return ('\n/* Made by amalgamate.py --profile %s: these groups are not in this file. */\n#if %s\n'
            '#error "a switch does not fit the groups that are in this mlfab.c"\n#endif\n%s'
            % (profile, " \\\n".join(asked), "".join("#define %s 0\n" % name for name in absent) +
               "".join("#undef %s\n#define %s 1\n" % (name, name) for name in needed) + UNUSED))


def title_line(text):
    return "/* ==== %s %s */" % (text, "=" * (100 - 13 - len(text)))


SYSTEM = re.compile(r"^#include <([^>]+)>\n", re.M)
AGAIN = re.compile(r"^#endif /\* (MLFAB_WITH_[^*\n]*) \*/\n((?:\n|/\* [^\n]* \*/\n)*)#if \1\n", re.M)


SWITCH = re.compile(r"^[ \t]*#[ \t]*(ifndef|ifdef|if|elif|else|endif)\b[ \t]*(.*?)[ \t]*(?:/\*.*\*/[ \t]*)?\n")
WORDS = re.compile(r"[()!]|&&|\|\||\w+")


def value(condition, known):
    """Of a condition of switches: 1, 0, or None if it depends on more than those known."""
    words = WORDS.findall(condition)
    if "".join(words) != condition.replace(" ", "") or any(word[0].isalnum() and not word.startswith("MLFAB_WITH_") for word in words):
        return None
    names = sorted({word for word in words if word.startswith("MLFAB_WITH_") and word not in known})
    results = set()
    for bits in range(2 ** len(names)):
        values = dict(known, **{name: bits >> i & 1 for i, name in enumerate(names)})
        text = " ".join({"&&": "and", "||": "or", "!": "not"}.get(word, str(values.get(word, word))) for word in words)
        results.add(bool(eval(text)))  # numbers, parentheses and the three operators
    return results.pop() if len(results) == 1 else None


def decided(text, known):
    """Without the lines that the known switches {name: 0 or 1} leave out, and without the conditions that say so."""
    lines, levels = [], []  # a level: the value of its condition, or None
    for line in re.findall(r"(?:[^\n]*\\\n)*[^\n]*\n", text):
        match = SWITCH.match(line.replace("\\\n", " "))
        word, condition = match.groups() if match else ("", "")
        if word in ("if", "ifdef", "ifndef"):
            known_name = word != "if" and condition in known
            levels.append(word == "ifdef" if known_name else value(condition, known) if word == "if" else None)
        elif word == "else" and levels[-1] is not None:
            levels[-1] = not levels[-1]
        elif word == "elif" and levels[-1] is not None:
            sys.exit("amalgamate.py: an #elif behind a condition of switches: %s" % line.strip())
        if (not match or levels[-1] is None) and False not in levels:
            lines.append(line)
        if word == "endif":
            levels.pop()
    return "".join(lines)


def once(text):
    """Without lines that parts repeat: system headers that every build has included above, and conditions that go on."""
    text = AGAIN.sub(r"\2", text)
    lines, depth, seen = [], 0, set()
    for line in text.splitlines(keepends=True):
        condition, include = CONDITION.match(line), SYSTEM.match(line)
        if condition:
            depth += -1 if condition.group(1) == "endif" else 1
        if include and include.group(1) in seen:
            continue
        if include and depth == 0:
            seen.add(include.group(1))
        lines.append(line)
    return re.sub(r"\n{3,}", "\n\n", "".join(lines))


def declarations(path):
    """The text of a header for experts: its guard, and each declaration in lines of at most 128 characters."""
    text = re.sub(r"(?m)^#ifdef __cplusplus\n.*\n#endif\n|^#include .*\n", "", COMMENT.sub("", read(path)))
    guard = re.sub(r"\W", "_", path).upper()
    if not text.strip().startswith("#ifndef %s\n#define %s\n" % (guard, guard)) or not text.rstrip().endswith("#endif"):
        problem("%s has no include guard %s" % (path, guard))
    lines = []
    for piece in re.findall(r"^#.*|[^#\s](?:[^;{}#]|\{[^{}#]*\})*;", text, re.M):
        lines += [piece.strip()] if piece[0] == "#" else textwrap.wrap(" ".join(piece.split()), 128, subsequent_indent="    ", break_on_hyphens=False)
    return "\n%s\n%s\n" % (title_line(path + " has the comments"), "\n".join(lines))


def join(parts, title, main_header, profile=None):
    """The text of an output file made of these parts, without those that the profile leaves out."""
    done = set()
    out = []
    needed = {os.path.normpath(os.path.join(os.path.dirname(path), include)) for path in parts for include in INCLUDE.findall(read(path))}
    if "mlfab_node.h" in needed:
        needed.add("mlfab_transport.h")
    left_out = {path for path, part in parts.items()
                if profile and part.left_out(PROFILES[profile])}

    def banner(path, text):
        """The comment that every file begins with has its name; here it gets the path and a mark to search for."""
        name = "/* %s - " % os.path.basename(path)
        if text.count(name) != 1 or "*/" in text[:text.index(name)]:
            problem("%s does not begin with a comment '%s...'" % (path, name))
            return text
        return "\n" + text.replace(name, "/* ==== %s - " % path)

    def text_of(part):
        """The file's text with its local includes replaced; headers come first, once each."""
        if part.path in done or part.path in left_out:
            return ""
        done.add(part.path)
        text = read(part.path)
        if part.path.endswith(".h"):
            # The guard has no use here, and without it a header's includes are unconditional.
            if not GUARD.search(text) or not GUARD_END.search(text):
                problem("%s has no include guard MLFAB__<NAME>_H" % part.path)
            text = GUARD_END.sub("\n", GUARD.sub("", text, count=1))
        before, result, depth = [], [], 0
        for number, line in enumerate(text.splitlines(keepends=True), 1):
            condition = CONDITION.match(line)
            if condition:
                depth += -1 if condition.group(1) == "endif" else 1
            include = INCLUDE.match(line)
            if not include:
                result.append(line)
                continue
            where = "%s:%d" % (part.path, number)
            path = os.path.normpath(os.path.join(os.path.dirname(part.path), include.group(1)))
            if path in PUBLIC_HEADERS:
                if path not in done:
                    done.add(path)
                    result.append('#include "%s"\n' % path)
                    if path == "mlfab.h":
                        result += [declarations(header) for header in EXPERT_HEADERS if header in needed]
                continue
            if path in EXPERT_HEADERS:
                continue
            if path not in parts:
                problem("%s: includes %s, which is not in the list" % (where, path))
                continue
            target = parts[path]
            if path.endswith(".c"):
                problem("%s: includes a source file" % where)
            if depth > 0 and path not in done and target.module != part.module:
                problem("%s: includes %s inside a condition, where others need it too"
                        % (where, path))
            if part.switches and path not in done and target.switches != part.switches:
                problem("%s: includes %s first, which is not left out with it" % (where, path))
            inlined = text_of(target)
            if inlined and depth == 0 and not re.sub(r"(?m)^#include .*$|\s", "", COMMENT.sub("", "".join(result))):
                before.append(inlined)  # nothing precedes it but the file's comment
            elif inlined:
                result.append(inlined + "\n/* %s goes on. */\n" % part.path)
        text = "".join(result)
        if part.switches and (part.needs or not stays(profile) & set(part.switches)):
            text = "#if %s\n%s#endif /* %s */\n" % (part.condition(), text, part.condition())
        return "".join(before) + banner(part.path, text)

    for part in sorted(parts.values(), key=lambda p: (p.position, p.path.endswith(".c"))):
        out.append(text_of(part))
    if any(part.switches and part.path.endswith(".c") for part in parts.values()):
        out.append(stubs(parts, profile))

    header = read("mlfab.h")
    version = re.search(r'#define MLFAB_VERSION "([^"]+)"', header).group(1)
    licence = "\n".join(" * " + line if line else " *"
                        for line in read("LICENSE").strip().splitlines())
    opening = (title + PROLOGUE).format(version=version, licence=licence, header=main_header,
                                        switches="" if profile else SWITCHES_TITLE)
    text = "".join(out)
    if profile:
        known = {"MLFAB_WITH_" + name: 0 for name in SWITCHES if name not in PROFILES[profile]}
        text = profile_prologue(profile) + decided(text, dict(known, **{"MLFAB_WITH_" + name: 1 for name in stays(profile)}))
    text = once(opening + text)
    if profile:
        rows = [(struct, member) for switches, struct, members in MEMBERS for member in members.split()
                if not set(switches.split()) & set(PROFILES[profile]) and "struct %s {" % struct in text]
        text, wrong = shortener().without(text, rows)
        reductions[profile] = ["the profile %s: %s" % (profile, line) for line in wrong]
    return text if main_header == "mlfab_sim.h" else shortener().stated_once(text)


def shortener():
    """The module tools/absent.py. The simulator is made without it: a package may lack that folder."""
    sys.path.insert(0, os.path.join(ROOT, "tools"))
    import absent
    return absent


def profile_text(parts, profile):
    """A profile includes headers in conditions that the whole has included before: no problem of the sources."""
    before = list(problems)
    text = join(parts, LIBRARY_TITLE, "mlfab.h", profile)
    problems[:] = before + reductions[profile]
    return text


def stored(path):
    """The bytes of the file as it is; None when there is none."""
    path = os.path.join(ROOT, path)
    if not os.path.exists(path):
        return None
    with open(path, "rb") as file:
        return file.read()


def write(path, text):
    if stored(path) != text.encode("utf-8"):
        # A reader never sees half a file.
        new = os.path.join(ROOT, path + ".new")
        with open(new, "wb") as file:
            file.write(text.encode("utf-8"))
        os.replace(new, os.path.join(ROOT, path))
    print("%s: %d lines from %d files" % (path, text.count("\n"), len(text.split("\n/* ====")) - 1))


def check(path, text):
    if stored(path) == text.encode("utf-8"):
        print("%s has the text of its parts (%d lines)" % (path, text.count("\n")))
    else:
        problem("%s has another text than its parts: run `make amalgamate`" % path)


def main():
    how = sys.argv[1] if len(sys.argv) > 1 else ""
    profile = len(sys.argv) == 5 and how == "--profile" and sys.argv[2] in PROFILES and sys.argv[3] == "-o"
    one = len(sys.argv) == 3 and how == "--simulator"
    if not profile and not one and (sys.argv[2:] or how not in ("", "--check", "--graph", "--breaches")):
        sys.exit(__doc__.strip())
    parts = list_parts()
    if how == "--graph" and not problems:
        graph(parts)
        return
    simulator = simulator_parts(parts)
    library = {path: part for path, part in parts.items() if part.module != SIMULATOR}
    if profile and not problems:
        os.makedirs(sys.argv[4], exist_ok=True)
        folder = os.path.abspath(sys.argv[4])
        write(os.path.join(folder, "mlfab.c"), profile_text(library, sys.argv[2]))
        write(os.path.join(folder, "mlfab.h"), read("mlfab.h"))
        return
    for part in simulator.values() if one else ():
        part.switches = []
    text = join(simulator, SIMULATOR_TITLE, "mlfab_sim.h") if one else join(library, LIBRARY_TITLE, "mlfab.h")
    if not one:
        judge(parts, how == "--breaches")
    if how == "--check":
        check("mlfab.c", text)
        for name, ceiling in CEILINGS.items():
            lines = (profile_text(library, name) if name else text).count("\n")
            if lines > ceiling:
                problem("%s has %d lines, more than its ceiling, %d: make room first"
                        % ("the profile " + name if name else "mlfab.c", lines, ceiling))
    if problems:
        for line in problems:
            print("amalgamate.py: " + line, file=sys.stderr)
        sys.exit(1)
    if how == "--simulator":
        write(os.path.abspath(sys.argv[2]), text)
    elif not how:
        write("mlfab.c", text)


if __name__ == "__main__":
    main()
