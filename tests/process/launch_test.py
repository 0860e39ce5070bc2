#!/usr/bin/env python3
# lane: check
# limit: 600
# alone: slurm's daemons give up on each other if the machine is busy
"""Launchers, for real: mpirun of every MPI library, srun and sbatch in a Slurm that this test starts on loopback,
torchrun, and the command of the Kubernetes manifest in network namespaces. They start the scripts of
examples/launchers/. Each says its version, which docs/clusters.md repeats."""
import getpass
import glob
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time

from process import BUILD, Result, Skip, clean_environment, expect, finish, free_port, is_alive, main, run, start, wait_until

SCRIPTS = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", "examples", "launchers"))
TRAINER = os.path.join(BUILD, "examples", "01_push_pull")
MPIS = sorted(os.path.basename(os.path.dirname(path)) for path in glob.glob(os.path.join(BUILD, "mpi", "*", "world")))
KEY = "0123456789abcdef" * 2


def tell(text):
    print("# " + text)
    sys.stdout.flush()


def sums(result, workers, times=1):
    """01_push_pull has ended well: all workers were in one fabric."""
    total = 5 * workers * (workers + 1)
    expect(result.code == 0, "it ends well", result)
    expect(result.out.count("pulled %d and %g, expected" % (total, total / 2)) == workers * times,
           "%d workers pull the sum of all" % workers, result)


def key_file():
    key = tempfile.NamedTemporaryFile("w", prefix="mlfab-key-")
    key.write(KEY + "\n")
    key.flush()
    return key


# --- mpirun

MPI_ENVIRONMENT = dict(OMPI_ALLOW_RUN_AS_ROOT=1, OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1, OMPI_MCA_rmaps_base_oversubscribe=1,
                       OMPI_MCA_hwloc_base_binding_policy="none", OMPI_MCA_btl="self,vader", OMPI_MCA_mpi_yield_when_idle=1,
                       HYDRA_LAUNCHER="fork")


def mpirun(mpi):
    name = "mpirun" if mpi == "default" else "mpirun." + mpi
    if not shutil.which(name):
        raise Skip("%s is not installed" % name)
    return name


def every_mpi():
    if not MPIS:
        raise Skip("no MPI library is installed (libopenmpi-dev, libmpich-dev)")
    for mpi in MPIS:
        version = run(mpirun(mpi), "--version").out
        tell("%s: %s" % (mpi, " ".join(re.findall(r"OpenRTE\) [\d.]+|Open MPI\) [\d.]+|Version: +[\d.]+", version)[:1])))
    return MPIS


def test_mpirun():
    """A program without MPI: the launcher gives the ranks, the script the address."""
    for mpi in every_mpi():
        script = [os.path.join(SCRIPTS, "mpirun.sh"), 3, TRAINER]
        environment = dict(MPIRUN=mpirun(mpi), MLFAB_TIMEOUT_MS=30000, **MPI_ENVIRONMENT)
        sums(run(*script, env=clean_environment(**environment)), 3)
        with key_file() as key:  # the script says tcp:localhost:PORT
            sums(run(*script, env=clean_environment(HOSTS="localhost:3", PORT=free_port(), MLFAB_KEY_FILE=key.name,
                                                    **environment)), 3)


def test_mpirun_over_mpi():
    for mpi in every_mpi():
        result = run(os.path.join(SCRIPTS, "mpirun.sh"), 3, os.path.join(BUILD, "mpi", mpi, "world"),
                     env=clean_environment(MPIRUN=mpirun(mpi), MLFAB_TRANSPORT="mpi", MASTER_ADDR="nobody.invalid",
                                           MASTER_PORT=1, MLFAB_TIMEOUT_MS=30000, **MPI_ENVIRONMENT))
        expect(result.code == 0 and len(re.findall("^0: ok rank . of 3 as", result.out, re.M)) == 3, "all work", result)


def test_mpirun_without_an_address():
    """Open MPI names its job and says that all are on one host, so they meet; MPICH does not, and that is the error."""
    for mpi in every_mpi():
        result = run(mpirun(mpi), "-n", 3, TRAINER, env=clean_environment(MLFAB_TIMEOUT_MS=30000, **MPI_ENVIRONMENT))
        if mpi == "openmpi":
            sums(result, 3)
        else:
            expect(result.code != 0 and result.err.count("PMI_SIZE='3': and no address of rank 0") == 3, mpi, result)


def told_by_script(script, *arguments, **environment):
    """The script runs with programs in the launchers' place that print the arguments and settings that they are given."""
    with tempfile.TemporaryDirectory(prefix="mlfab-launch-") as folder:
        tells = 'env | grep ^MLFAB_; echo "started $@"'
        for name, text in (("mpirun", 'echo "(Open MPI)"; ' + tells), ("srun", tells), ("torchrun", tells),
                           ("scontrol", 'echo node1; echo node2'),
                           ("hostname", '[ "$*" = -I ] && echo 10.0.0.2 || echo node2')):
            with open(os.path.join(folder, name), "w", encoding="ascii") as file:
                file.write("#!/bin/sh\n%s\n" % text)
            os.chmod(os.path.join(folder, name), 0o755)
        return run(os.path.join(SCRIPTS, script), *arguments,
                   env=clean_environment(PATH=folder + ":" + os.environ["PATH"], HOME="/home/me", **environment))


def test_scripts_keep_what_is_set():
    """A key or an address that the user has set is not replaced; without them each script has its own."""
    for script, settings in (("mpirun.sh", dict(HOSTS="node1:2,node2:2")), ("torchrun.sh", dict(NODES=2, FIRST="node1")),
                             ("slurm.sh", dict(SLURM_JOB_ID=7, SLURM_JOB_NUM_NODES=2, SLURM_JOB_NODELIST="node[1-2]"))):
        result = told_by_script(script, 2, "./trainer", **settings)
        lines = result.out.split("\n")
        expect(result.code == 0 and "started" in result.out, script, result)
        expect("MLFAB_COORDINATOR=tcp:node1:29400" in lines and "MLFAB_KEY_FILE=/home/me/.mlfab-key" in lines, script, result)
        result = told_by_script(script, 2, "./trainer", MLFAB_KEY=KEY, MLFAB_COORDINATOR="tcp:node1:7", **settings)
        lines = result.out.split("\n")
        expect(result.code == 0 and "MLFAB_COORDINATOR=tcp:node1:7" in lines and "MLFAB_KEY=" + KEY in lines, script, result)
        expect("MLFAB_KEY_FILE" not in result.out, "%s: one key" % script, result)
    expect("MLFAB_COORDINATOR=unix:@mine\n" in told_by_script("mpirun.sh", 2, "./trainer", MLFAB_COORDINATOR="unix:@mine").out,
           "also on one host")


def test_scripts_over_mpi():
    """Nobody needs an address then, and mlfab_open would refuse one."""
    for transport in ("mpi", "mpi+shm"):
        for script, settings in (("mpirun.sh", dict(HOSTS="node1:2,node2:2")),
                                 ("slurm.sh", dict(SLURM_JOB_ID=7, SLURM_JOB_NUM_NODES=2, SLURM_JOB_NODELIST="node[1-2]"))):
            result = told_by_script(script, 2, "./trainer", MLFAB_TRANSPORT=transport, **settings)
            expect(result.code == 0 and "started" in result.out and "MLFAB_COORDINATOR" not in result.out, script, result)


def test_scripts_that_are_used_wrongly():
    for script, settings, text in (("mpirun.sh", {}, "number of processes"), ("torchrun.sh", {}, "number of processes"),
                                   ("slurm.sh", {}, "sbatch")):
        result = told_by_script(script, **settings)
        expect(result.code != 0 and text in result.err and "started" not in result.out, script, result)
    result = told_by_script("torchrun.sh", 2, "./trainer", NODES=3, FIRST="node1")
    expect(result.code != 0 and "NODE_RANK" in result.err, "the second and the third host would have the same number", result)


def test_the_number_of_a_host():
    for number, settings in ((1, dict(FIRST="node1")), (0, dict(FIRST="node2")), (0, dict(FIRST="10.0.0.2")),
                             (1, dict(FIRST="10.0.0.1")), (2, dict(FIRST="node1", NODES=3, NODE_RANK=2))):
        result = told_by_script("torchrun.sh", 2, "./trainer", **dict(dict(NODES=2), **settings))
        expect("--node_rank %d " % number in result.out, "%s" % settings, result)


# --- Slurm

def program(name):
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


class Slurm:
    """slurmctld, slurmd and munged of this test alone, with all files in a folder of their own: one node, on loopback, or
    two nodes, each in a network namespace."""

    def __init__(self, nodes=()):
        wanted = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
        lacking = [name for name in wanted if not program(name)]
        if lacking:
            raise Skip("not installed: %s (slurmctld, slurmd, slurm-client, munge)" % ", ".join(lacking))
        self.pods = Pods(nodes, "cluster") if nodes else None
        self.nodes = nodes or [socket.gethostname().split(".")[0]]
        self.folder = tempfile.mkdtemp(prefix="mlfab-slurm-", dir="/tmp")
        os.chmod(self.folder, 0o711)
        for name in ("state", "spool", "munge", *(os.path.join("spool", node) for node in self.nodes)):
            os.mkdir(os.path.join(self.folder, name), 0o711)
        self.daemons = []
        try:
            self.up()
        except BaseException:
            self.down()
            raise

    def path(self, *names):
        return os.path.join(self.folder, *names)

    def up(self):
        with open(self.path("munge", "key"), "wb") as key:
            key.write(os.urandom(128))
        os.chmod(self.path("munge", "key"), 0o600)
        first, who, mine = self.nodes[0], getpass.getuser(), self.path
        settings = dict(
            ClusterName="mlfab", SlurmctldHost=first if self.pods else first + "(127.0.0.1)", SlurmUser=who, SlurmdUser=who,
            AuthType="auth/munge", AuthInfo="socket=" + mine("munge", "s"), CredType="cred/munge",
            SlurmctldPort=free_port(), SlurmdPort=free_port(), StateSaveLocation=mine("state"),
            SlurmdSpoolDir=mine("spool", "%n"), SlurmctldPidFile=mine("ctld.pid"), SlurmdPidFile=mine("slurmd-%n.pid"),
            SlurmctldLogFile=mine("ctld.log"), SlurmdLogFile=mine("slurmd-%n.log"), ProctrackType="proctrack/linuxproc",
            TaskPlugin="task/none", SelectType="select/cons_tres", SelectTypeParameters="CR_CPU", SwitchType="switch/none",
            MpiDefault="none", ReturnToService=2, TmpFS=mine("spool", "%n"),
            CommunicationParameters="NoAddrCache" if self.pods else "NoCtldInAddrAny,NoInAddrAny",
            SchedulerParameters="sched_interval=1", SlurmdParameters="config_overrides")
        with open(mine("slurm.conf"), "w", encoding="ascii") as file:
            for name, value in settings.items():
                file.write("%s=%s\n" % (name, value))
            for node in self.nodes:
                file.write("NodeName=%s NodeAddr=%s CPUs=8 State=UNKNOWN\n" % (node, node if self.pods else "127.0.0.1"))
            file.write("PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES\n")
        self.daemon("munged", "--foreground", "--force", "--key-file=" + mine("munge", "key"), "--socket=" + mine("munge", "s"),
                    "--pid-file=" + mine("munge", "pid"), "--log-file=" + mine("munge", "log"),
                    "--seed-file=" + mine("munge", "seed"), "--num-threads=2")
        wait_until(lambda: os.path.exists(mine("munge", "s")), self.logs)
        self.daemon("slurmctld", "-D", "-i")
        for k in range(len(self.nodes)):
            self.daemon("slurmd", "-D", host=k)
        wait_until(lambda: self.run("sinfo", "-h", "-N", "-o", "%T", timeout=60).out.split() == ["idle"] * len(self.nodes), self.logs)

    def environment(self, **more):
        return clean_environment(SLURM_CONF=self.path("slurm.conf"), **more)

    def prefix(self, host=0):
        return self.pods.prefix(host) if self.pods else []

    def daemon(self, name, *arguments, host=0):
        with open(self.path("%s-%d.err" % (name, host)), "wb") as log:
            self.daemons.append(subprocess.Popen([*self.prefix(host), program(name), *arguments], env=self.environment(), stdin=subprocess.DEVNULL,
                                                 stdout=log, stderr=log, cwd=self.folder))

    def logs(self):
        text = "Slurm:\n"
        for path in sorted(glob.glob(self.path("*.err")) + glob.glob(self.path("*.log"))):
            with open(path, encoding="utf-8", errors="replace") as file:
                text += "%s:\n%s\n" % (path, file.read()[-2000:])
        return text

    def run(self, *command, **more):
        timeout = more.pop("timeout", 90)
        return run(*self.prefix(), *command, env=self.environment(**more), timeout=timeout, cwd=self.folder)

    def batch(self, *arguments, **more):
        """sbatch with the script of the examples; what the job has written."""
        out = self.path("job.out")
        result = self.run("sbatch", "--wait", "--quiet", "-o", out, "-e", out, *arguments, **more)
        with open(out, encoding="utf-8", errors="replace") as file:
            result.out = file.read()
        return result

    def steps(self):
        """Processes of the jobs: slurmstepd writes the step into its name, and has the daemon's files open."""
        found = []
        for path in glob.glob("/proc/[0-9]*/environ"):
            try:
                with open(path, "rb") as file:
                    if self.folder.encode() in file.read():
                        found.append(int(path.split("/")[2]))
            except OSError:
                pass
        own = {daemon.pid for daemon in self.daemons} | {os.getpid()}
        return [pid for pid in found if pid not in own and is_alive(pid)]

    def down(self):
        if len(self.daemons) == 2 + len(self.nodes):
            self.run("scancel", "--user", getpass.getuser(), timeout=30)
            deadline = time.monotonic() + 10
            while self.steps() and time.monotonic() < deadline:
                time.sleep(0.1)
        for daemon in reversed(self.daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for pid in self.steps():
            os.kill(pid, 9)
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.pods:
            self.pods.down()


SLURM = []


def slurm():
    """One for all cases; `skipped` keeps the reason."""
    if not SLURM:
        SLURM.append(Slurm())
        tell(SLURM[0].run("srun", "--version").out.strip())
    return SLURM[0]


def test_srun():
    """On one node nothing has to be set; with another address, and a key, also not more than that."""
    cluster = slurm()
    sums(cluster.run("srun", "-n", 4, TRAINER, MLFAB_TIMEOUT_MS=30000), 4)
    sums(cluster.run("srun", "-n", 3, TRAINER, MLFAB_TIMEOUT_MS=30000, MLFAB_KEY=KEY,
                     MLFAB_COORDINATOR="tcp:127.0.0.1:%d" % free_port()), 3)


def test_two_steps_at_once_do_not_meet():
    cluster = slurm()
    both = [start("srun", "--overlap", "-n", n, TRAINER, env=cluster.environment(MLFAB_TIMEOUT_MS=30000)) for n in (2, 3)]
    for process, workers in zip(both, (2, 3)):
        sums(finish(process, 90), workers)


def test_sbatch():
    cluster = slurm()
    result = cluster.batch("--ntasks-per-node=3", os.path.join(SCRIPTS, "slurm.sh"), TRAINER, MLFAB_TIMEOUT_MS=30000)
    sums(result, 3)


def test_a_batch_script_is_no_rank():
    """The script's own process has SLURM_PROCID and SLURM_NTASKS, too."""
    cluster = slurm()
    script = cluster.path("alone.sh")
    with open(script, "w", encoding="ascii") as file:
        file.write("#!/bin/sh\n#SBATCH --ntasks=3\nenv | grep ^SLURM_ | sort\nexec %s\n" % TRAINER)
    result = cluster.batch(script, MLFAB_TIMEOUT_MS=30000)
    expect("SLURM_NTASKS=3" in result.out and "SLURM_PROCID=0" in result.out, "Slurm tells a rank", result)
    sums(result, 1)


def test_several_nodes_need_an_address():
    cluster = slurm()
    result = cluster.run("srun", "-n", 2, "env", "SLURM_STEP_NUM_NODES=2", "SLURM_STEP_NODELIST=node[1-2]", TRAINER)
    expect(result.code != 0 and result.err.count("SLURM_STEP_NODELIST='node[1-2]': and no address of rank 0") == 2,
           "both say so", result)


def test_slurm_with_two_nodes():
    """Each node has a network, a host name and a /dev/shm of its own. The script finds the address."""
    cluster = Slurm(["node1", "node2"])
    try:
        result = cluster.run("srun", "-N", 2, "-n", 2, TRAINER)
        expect(result.code != 0 and result.err.count("SLURM_STEP_NODELIST='node[1-2]': and no address of rank 0") == 2,
               "without it, an error", result)
        with key_file() as key:
            result = cluster.batch("--nodes=2", "--ntasks-per-node=2", os.path.join(SCRIPTS, "slurm.sh"), TRAINER,
                                   MLFAB_KEY_FILE=key.name, MLFAB_TIMEOUT_MS=30000)
        sums(result, 4)
        where = cluster.run("srun", "-N", 2, "-n", 2, "hostname").out.split()
        expect(sorted(where) == ["node1", "node2"], "the tasks are on both", where)
        over_mpi(cluster, 4, 2)
    finally:
        cluster.down()


def over_mpi(cluster, tasks, nodes):
    """Slurm's PMIx starts Open MPI, its PMI-2 starts MPICH. Between nodes, MPI_Finalize of Debian 12's MPICH does not
    return in most runs, with programs without mlfab too (tests/mpi/plain.c): so MPICH is left out there."""
    for mpi in every_mpi():
        kind = {"openmpi": "pmix", "mpich": "pmi2"}.get(mpi)
        if not kind or (mpi == "mpich" and nodes > 1):
            continue
        result = cluster.batch("--nodes=%d" % nodes, "--ntasks-per-node=%d" % (tasks // nodes),
                               os.path.join(SCRIPTS, "slurm.sh"), "--mpi=" + kind, os.path.join(BUILD, "mpi", mpi, "world"),
                               MLFAB_TRANSPORT="mpi", MLFAB_TIMEOUT_MS=40000,
                               **dict(MPI_ENVIRONMENT, OMPI_MCA_btl="self,vader,tcp"))
        expect(result.code == 0 and len(re.findall("^0: ok rank . of %d as" % tasks, result.out, re.M)) == tasks,
               "%s by srun --mpi=%s" % (mpi, kind), (result, cluster.logs()))
        tell("%s by srun --mpi=%s on %d nodes: all work" % (mpi, kind, nodes))


def test_srun_over_mpi():
    cluster = slurm()
    tell("srun --mpi=list: " + " ".join((lambda r: r.out + r.err)(cluster.run("srun", "--mpi=list")).split()))
    over_mpi(cluster, 3, 1)


# --- torchrun

TORCHRUN = dict(MLFAB_TIMEOUT_MS=60000, OMP_NUM_THREADS=1, TORCHRUN_OPTIONS="--redirects 1 --tee 1")


def test_torchrun():
    if not shutil.which("torchrun"):
        raise Skip("torchrun is not installed (python3-torch)")
    said = run("sh", "-c", "$(head -n 1 $(command -v torchrun) | cut -c 3-) -c 'import torch; print(torch.__version__)'").out
    tell("torchrun of PyTorch " + said.strip())
    result = run(os.path.join(SCRIPTS, "torchrun.sh"), 3, TRAINER, timeout=120,
                 env=clean_environment(**TORCHRUN))
    sums(result, 3)


def test_torchrun_on_two_hosts():
    """The same command on both; each host is a network namespace with a name."""
    if not shutil.which("torchrun"):
        raise Skip("torchrun is not installed (python3-torch)")
    with key_file() as key:
        results = on_hosts(["node1", "node2"], "cluster", lambda pods: [
            pods.start(k, [os.path.join(SCRIPTS, "torchrun.sh"), "2", TRAINER], NODES=2, FIRST="node1",
                       MLFAB_KEY_FILE=key.name, **TORCHRUN) for k in (0, 1)])
    sums(results, 4)


# --- Kubernetes

def documents(path):
    """The manifest's documents, by kind."""
    text = ("import json, sys, yaml; print(json.dumps(list(yaml.safe_load_all(open(sys.argv[1])))))")
    for python in (sys.executable, "/usr/bin/python3"):
        result = run(python, "-c", text, path)
        if result.code == 0:
            return {document["kind"]: document for document in json.loads(result.out)}
    raise Skip("no YAML parser is installed (python3-yaml)")


def manifest():
    """Service, Job, its only container, and that container's environment; checks that they fit each other."""
    parts = documents(os.path.join(SCRIPTS, "kubernetes.yaml"))
    expect(set(parts) == {"Service", "Job"}, "a Service and a Job", parts)
    service, job = parts["Service"], parts["Job"]
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    expect(service["apiVersion"] == "v1" and job["apiVersion"] == "batch/v1", "versions of the kinds", parts)
    expect(service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True,
           "the service gives names to pods, at once", service)
    # The Job controller labels its pods with job-name.
    expect(service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}, "it finds the pods", service)
    expect(pod["subdomain"] == service["metadata"]["name"], "the pods are in the service's domain", pod)
    expect(pod["restartPolicy"] == "Never" and spec["completionMode"] == "Indexed", "indexed", spec)
    expect(type(spec["completions"]) is int and spec["completions"] == spec["parallelism"], "all at once", spec)
    expect(all(isinstance(item.get("value", ""), str) for item in container["env"]), "values are texts", container)
    values = {item["name"]: item.get("value", KEY) for item in container["env"]}
    expect(values["MLFAB_WORKERS"] == str(spec["completions"]), "each completion is a worker", values)
    expect(re.match(r"tcp:%s-0\.%s:\d+$" % (job["metadata"]["name"], pod["subdomain"]), values["MLFAB_COORDINATOR"]),
           "pod 0 is where they meet", values)
    expect(all(set(item["valueFrom"]["secretKeyRef"]) == {"name", "key"} for item in container["env"] if "value" not in item),
           "the key is a secret", container)
    return service, job, container, values


def test_the_manifest_fits_together():
    service, job, container, values = manifest()
    tell("%s of %d pods, image %s" % (job["spec"]["completionMode"], job["spec"]["completions"], container["image"]))


class Pods:
    """A network namespace for each pod, with its host name, the names of the others, and a /dev/shm of its own."""

    def __init__(self, names, domain):
        if os.geteuid() != 0 or not shutil.which("ip"):
            raise Skip("network namespaces need root and iproute2")
        self.tag = "mp%d" % (os.getpid() % 100000)
        self.names, self.domain = names, domain
        self.folder = tempfile.mkdtemp(prefix="mlfab-hosts-")
        try:
            self.up()
        except BaseException:
            self.down()
            raise

    def must(self, *command):
        result = run("ip", *command)
        if result.code:
            raise Skip("network namespaces cannot be made here: ip %s: %s" % (" ".join(command), result.err.strip()[:120]))

    def space(self, k):
        return "%sn%d" % (self.tag, k)

    def up(self):
        with open(os.path.join(self.folder, ".resolv.conf"), "w", encoding="ascii") as file:
            file.write("nameserver 127.0.0.1\n")
        self.must("link", "add", self.tag + "b", "type", "bridge")
        self.must("link", "set", self.tag + "b", "up")
        for k in range(len(self.names)):
            space, outer = self.space(k), "%sv%d" % (self.tag, k)
            self.must("netns", "add", space)
            self.must("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
            self.must("link", "set", outer, "master", self.tag + "b", "up")
            self.must("-n", space, "addr", "add", "10.79.0.%d/24" % (k + 1), "dev", "eth0")
            self.must("-n", space, "link", "set", "lo", "up")
            self.must("-n", space, "link", "set", "eth0", "up")
            self.hosts(k, range(len(self.names)))
        result = run(*self.prefix(0), "true")
        if result.code:
            raise Skip("processes with mount and UTS namespaces of their own cannot be made here: " + result.err.strip()[:120])

    def hosts(self, k, known):
        """The names that pod k can resolve. Written in place: the pod's /etc/hosts is this very file."""
        lines = ["127.0.0.1 localhost"]
        lines += ["10.79.0.%d %s.%s.default.svc.cluster.local %s.%s %s" % (i + 1, name, self.domain, name, self.domain, name)
                  for i, name in enumerate(self.names) if i in known]
        with open(os.path.join(self.folder, self.names[k]), "w", encoding="ascii") as file:
            file.write("\n".join(lines) + "\n")

    def prefix(self, k):
        """What to write before a command that runs in pod k. No name server is asked."""
        inside = ('mount --bind "$1" /etc/hosts && mount --bind "$2" /etc/resolv.conf && mount -t tmpfs tmpfs /dev/shm '
                  '&& hostname "$0" && shift 2 && exec "$@"')
        return ["nsenter", "--net=/run/netns/" + self.space(k), "unshare", "--mount", "--uts", "--ipc", "sh", "-c", inside,
                self.names[k], os.path.join(self.folder, self.names[k]), os.path.join(self.folder, ".resolv.conf")]

    def start(self, k, command, **environment):
        return start(*self.prefix(k), *command, env=clean_environment(HOSTNAME=self.names[k], **environment))

    def down(self):
        for k in range(len(self.names)):
            run("ip", "netns", "del", self.space(k))
            run("ip", "link", "del", "%sv%d" % (self.tag, k))
        run("ip", "link", "del", self.tag + "b")
        shutil.rmtree(self.folder, ignore_errors=True)


def on_hosts(names, domain, begin):
    """One Result of all processes that begin(pods) starts."""
    pods, running = Pods(names, domain), []
    try:
        running = begin(pods)
        results = [finish(process, 120) for process in running]
    finally:
        for process in running:
            process.kill()
        pods.down()
    for result in results:
        expect(result.code == 0, "every host ends well", results)
    return Result(running[0], "".join(r.out for r in results), "".join(r.err for r in results), 0)


def command_of(container, trainer):
    return [trainer if word == "/usr/local/bin/trainer" else word for word in container["command"] + container.get("args", [])]


def test_the_command_of_the_manifest():
    """One process a pod, with the variables of the manifest and JOB_COMPLETION_INDEX. Pod 0 starts last, and its name
    is known to the others only then."""
    service, job, container, values = manifest()
    workers = job["spec"]["completions"]
    names = ["%s-%d" % (job["metadata"]["name"], index) for index in range(workers)]
    command = command_of(container, TRAINER)

    def begin(pods):
        running = []
        for k in range(workers):
            pods.hosts(k, [k])
        for index in [*range(1, workers), 0]:
            if index == 0:
                time.sleep(1.0)
                for k in range(workers):
                    pods.hosts(k, range(workers))
            running.append(pods.start(index, command, JOB_COMPLETION_INDEX=index, MLFAB_TIMEOUT_MS=40000, **values))
        return running

    sums(on_hosts(names, service["metadata"]["name"], begin), workers)


def test_a_pod_that_starts_again():
    """restartPolicy: OnFailure, with a trainer that goes on when a worker dies and comes back."""
    service, job, container, values = manifest()
    workers, victim = job["spec"]["completions"], 2
    names = ["%s-%d" % (job["metadata"]["name"], index) for index in range(workers)]
    command = command_of(container, os.path.join(BUILD, "examples", "11_comes_and_goes"))
    more = dict(MLFAB_TIMEOUT_MS=60000, MLFAB_HEARTBEAT_MS=1000, **values)

    def begin(pods):
        running = [pods.start(index, command, JOB_COMPLETION_INDEX=index, **more) for index in range(workers)]
        first = finish(running[victim])
        running[victim] = pods.start(victim, command, JOB_COMPLETION_INDEX=victim, **more)
        expect(first.code == -9, "worker %d kills itself" % victim, first)
        return running

    whole = on_hosts(names, service["metadata"]["name"], begin)
    expect(whole.out.count("the same everywhere after 300 steps") == workers, "all go on to the end", whole)


if __name__ == "__main__":
    try:
        main(globals(), jobs=1)
    finally:
        for cluster_ in SLURM:
            cluster_.down()
