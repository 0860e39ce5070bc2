#!/usr/bin/env python3
# lane: check
# limit: 600
"""tools/release.sh: the same revision gives the same bytes, from a whole tarball; a stale mlfab.c and a missing section of the
change log are refused. It runs on a clone in a temporary folder.

mlfab.c is checked as amalgamate.py checks it, but without the lengths of the profiles. These take nearly all of the time, and
`make test` compares them with their ceilings."""
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "process"))
from process import Skip, clean_environment, executable, expect, main, run  # noqa: E402

ROOT = os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))


def clone(folder):
    if not shutil.which("git") or not os.path.exists(os.path.join(ROOT, ".git")):
        raise Skip("no git repository is here")
    to = folder + "/clone"
    done = run("git", "clone", "-q", "--no-hardlinks", ROOT, to, timeout=200)
    expect(done.code == 0, "a clone", done)
    shutil.copy(ROOT + "/tools/release.sh", to + "/tools/release.sh")
    return to


SHORT_CHECK = """\
#!/bin/sh
[ "$*" = "amalgamate.py --check" ] || { echo "release.sh asks for: $*" >&2; exit 2; }
exec %s -c 'import amalgamate, sys; sys.argv[1:] = ["--check"]; amalgamate.CEILINGS.clear(); amalgamate.main()'
"""


def release(tree, to, revision="HEAD"):
    """release.sh, whose python3 checks the text of mlfab.c only."""
    folder = os.path.dirname(tree) + "/bin"
    os.makedirs(folder, exist_ok=True)
    executable(folder + "/python3", (SHORT_CHECK % sys.executable).encode())
    return run(tree + "/tools/release.sh", revision, to, cwd=tree,
               env=clean_environment(PATH=folder + ":" + os.environ["PATH"]), timeout=200)


def commit(tree, path, change):
    with open(os.path.join(tree, path), encoding="utf-8") as file:
        text = file.read()
    with open(os.path.join(tree, path), "w", encoding="utf-8") as file:
        file.write(change(text))
    subprocess.check_call(["git", "-C", tree, "-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-qam", "trial"])


def test_release():
    with tempfile.TemporaryDirectory() as folder:
        tree, sums, version = clone(folder), [], None
        for to in (folder + "/one", folder + "/two"):
            done = release(tree, to)
            expect(done.code == 0, "a tarball", done)
            said, name = done.out.splitlines()[-1].split()
            with open(os.path.join(to, name), "rb") as file:
                sums.append(hashlib.sha256(file.read()).hexdigest())
            expect(sums[-1] == said, "the printed sum", done)
            with tarfile.open(os.path.join(to, name)) as tar:
                files = tar.getnames()
            version = name[:-len(".tar.gz")]
            for file in ("mlfab.h", "mlfab.c", "Makefile", "LICENSE", "README.md", "CHANGELOG.md", "tools/mlfab-run.c"):
                expect(version + "/" + file in files, "it has " + file, files[:20])
        expect(sums[0] == sums[1], "the same bytes", sums)
        commit(tree, "core/base/heap.c", lambda text: text + "/* changed */\n")
        done = release(tree, folder + "/three")
        expect(done.code != 0 and "not current" in done.err, "a stale mlfab.c is refused", done)
        expect(not os.listdir(folder + "/three"), "nothing is written")
        commit(tree, "CHANGELOG.md", lambda text: text.replace("## 0.", "## 9."))
        done = release(tree, folder + "/three")
        expect(done.code != 0 and "CHANGELOG.md" in done.err, "a missing section is refused", done)


if __name__ == "__main__":
    main(globals())
