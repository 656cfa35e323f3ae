"""What a Slurm script finds on the node: its variables, `srun` and `scontrol`, and the files of its output.

A script becomes the command of a job in two parts. The *outer* part is bash: it sets variables and runs the *inner*
part, which is the script's own interpreter. Without files for the output bash becomes the interpreter, so there is no
process more than the script has. With such files bash stays: it passes SIGTERM on, and waits for the copies.

The text of a script of a shell travels within the command, so the script may be changed once it is submitted. One line
stands in place of its first line, which named the shell: lines keep their numbers.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from launch.faults import usage

#: Shells that can read the functions of `_prelude`.
SHELLS = frozenset({"bash", "dash", "ksh", "sh", "zsh"})
#: The most of one word of a command, in bytes; the kernel takes 128 KiB with a zero byte at the end.
WORD_BYTES_MAX = 131_000

#: Shell variables, and no variables of the environment: by `SLURM_NTASKS` and `SLURM_PROCID` programs, such as
#: Lightning, tell that `srun` starts their processes, and would then start none themselves.
_HIDDEN = ("SLURM_NTASKS=1", "SLURM_NPROCS=1", "SLURM_PROCID=0", "SLURM_LOCALID=0", "SLURM_NODEID=0")

#: One task runs in the job already, so `srun` just runs its command; it passes SIGTERM on, unless the script has a
#: trap of its own for that.
_SRUN = r"""
srun() {
while [ $# -gt 0 ]; do
case $1 in
--) shift; break;;
-[nN]1|--ntasks=1|--nodes=1|--ntasks-per-node=1) shift;;
-[nN]|--ntasks|--nodes|--ntasks-per-node)
[ "${2-}" = 1 ] || { __one_task "$1 ${2-}"; return 2; }; shift 2;;
--gpus=*|--gres=*|--gpus-per-node=*|--gpus-per-task=*)
[ "${1##*[:=]}" = "$GPU_ARBITER_GPUS" ] || { __one_task "$1"; return 2; }; shift;;
--gpus|-G|--gres|--gpus-per-node|--gpus-per-task)
[ "${2##*:}" = "$GPU_ARBITER_GPUS" ] || { __one_task "$1 ${2-}"; return 2; }; shift 2;;
-[uvlKOQs]|--unbuffered|--label|--exclusive|--exact|--overlap|--overcommit|--verbose|--quiet|--kill-on-bad-exit) shift;;
--cpu-bind=*|--gpu-bind=*|--mem-bind=*|--kill-on-bad-exit=*|--export=ALL|--mpi=*|--jobid=*|--wait=*|--hint=*) shift;;
--job-name=*|--cpus-per-task=*|--mem=*|--time=*|--distribution=*|--account=*|--partition=*|-[ctJmAp]?*) shift;;
-[ctJmAp]|--job-name|--cpus-per-task|--mem|--time|--distribution|--account|--partition|--cpu-bind|--mpi|--jobid)
shift 2;;
-*) __one_task "$1"; return 2;;
*) break;;
esac;
done;
[ $# -gt 0 ] || { echo "srun: no command is given" >&2; return 2; };
case "$(trap)" in
*TERM*) __own=1;;
*) __own=; trap 'kill -TERM "$__job" 2> /dev/null' TERM;;
esac;
{ (trap - INT QUIT; exec "$@") <&3 3<&- & } 3<&0; __job=$!;
while wait "$__job" && __code=0 || __code=$?; [ "$__code" -gt 128 ] && kill -0 "$__job" 2> /dev/null; do :; done;
[ "$__code" -le 128 ] || {
wait "$__job" 2> /dev/null && __last=0 || __last=$?; [ "$__last" = 127 ] || __code=$__last;
};
[ -n "$__own" ] || trap - TERM;
return "$__code";
};
__one_task() {
echo "srun: $1 asks for something else than one task with all GPUs of the job; leave it out, or use torchrun" >&2;
};
"""
_SCONTROL = r"""
scontrol() {
case "${1-} ${2-}" in
"show hostname"|"show hostnames") echo "$SLURMD_NODENAME";;
*) echo "scontrol: only 'show hostnames' works within a job; docs/slurm.md has our commands" >&2; return 1;;
esac;
};
"""

#: Bash that copies the output to files; `$copies` are the processes that do it. They outlive SIGTERM, by which a script
#: is told to leave: it may still print.
_COPY = """
begin() {
    mkdir -p -- "$(dirname -- "$1")" && : >> "$1" && { [ "$2" = append ] || : > "$1"; } && return
    echo "the job cannot write its output to $1; see that the folder can be written on node $SLURMD_NODENAME" >&2
    exit 1
}
copy() { trap '' HUP INT TERM; exec tee -a -- "$1"; }
"""
_RUN = """
(trap - INT QUIT; exec "$@") <&0 & job=$!
trap 'kill -TERM "$job"' TERM
{ while wait "$job"; kill -0 "$job"; do :; done; wait "$job"; } 2> /dev/null
code=$?
exec >&- 2>&-
(sleep 5; kill -KILL $copies) &
wait $copies
exit "$code"
"""

_PATTERN = re.compile(r"%(\d*)(.?)", re.DOTALL)


class Script(Struct, frozen=True):
    """A batch script.

    Attributes
    ----------
    path
        Absolute; of a script that has no file just a name.
    text
        What it holds, as far as it is text.
    interpreter
        The words of its first line: a program and its flags.
    is_text
        Whether all of it is text, which can be a word of a command.
    has_file
        Whether it can be run by its path.
    """

    path: str
    text: str
    interpreter: tuple[str, ...]
    is_text: bool = True
    has_file: bool = True

    @property
    def in_shell(self) -> bool:
        """Whether its interpreter is a shell that we can add to."""
        return Path(self.interpreter[0]).name in SHELLS


class Around(Struct, frozen=True):
    """What is around a script.

    Attributes
    ----------
    name, user, submit_dir
        The job's name, the user's, and the folder that it is submitted from.
    array
        The indices of its array, empty without one; `array_step` is the distance between them.
    variables
        Others that follow from the flags, by name.
    stdin, stdout, stderr
        Patterns of the names of files; empty without.
    append
        Whether files go on where they end: never, from the second attempt on, or always.
    """

    name: str
    user: str
    submit_dir: str
    array: tuple[int, ...] = ()
    array_step: int = 1
    variables: Mapping[str, str] = {}
    stdin: str = ""
    stdout: str = ""
    stderr: str = ""
    append: str = "again"


def interpreter_of(text: str, name: str) -> tuple[str, ...]:
    """Return the interpreter that the first line of a script names, and its flags.

    Raises
    ------
    Fault
        If there is none.
    """
    first = text.partition("\n")[0]
    if "\r" in first or "\r\n" in text:
        raise usage(f"{name} has lines that end as on DOS (\\r\\n), which no shell can read", f"dos2unix {name}")
    words = first.removeprefix("#!").split()
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if word != "-S"]
    words = [word for word in words if word not in ("-", "--")]
    if not first.startswith("#!") or not words:
        raise usage(f"{name} is no batch script: its first line names no interpreter", "begin it with #!/bin/bash")
    return tuple(words)


def command(script: Script, arguments: Sequence[str], around: Around) -> tuple[str, ...]:
    """Return the command of a job that runs `script` with these arguments."""
    name = Path(script.path).name
    return ("bash", "-c", _outer(around), name, *inner(script), *arguments)


def travels(script: Script) -> bool:
    """Whether the text of a script travels with the command, so that changes of the file do not matter."""
    return script.in_shell and script.is_text and len(_with_prelude(script).encode()) <= WORD_BYTES_MAX


def inner(script: Script) -> tuple[str, ...]:
    """Return the command that runs a script by its own interpreter."""
    if not script.in_shell:
        return (*script.interpreter, script.path)
    text = _with_prelude(script) if travels(script) else f'{_prelude(script)} . "$0"'
    return (*script.interpreter, "-c", text, script.path)


def _with_prelude(script: Script) -> str:
    rest = script.text.partition("\n")[2].rstrip()
    return f"{_prelude(script)}\n{rest}"


def _prelude(script: Script) -> str:
    """Return, in one line, what a script of a shell finds beside variables of its environment."""
    hidden = " ".join(name.partition("=")[0] for name in _HIDDEN)
    functions = (_SRUN + _SCONTROL).replace("\n", " ")
    export = " export -f srun scontrol __one_task;" if Path(script.interpreter[0]).name == "bash" else ""
    return f"unset {hidden}; {' '.join(_HIDDEN)};{functions}{export}"


def _outer(around: Around) -> str:
    """Return the outer part, in bash: variables, files, and the run of the inner part."""
    lines = [f"export {name}={value}" for name, value in _variables(around).items()]
    if around.stdin:
        lines.append(f"exec < {pattern(around.stdin, around)} || exit")
    if not (around.stdout or around.stderr):
        return "\n".join((*lines, 'exec "$@"'))
    lines += [_COPY.strip(), f"mode={_mode(around.append)}"]
    out, err = (pattern(each, around) if each else "" for each in (around.stdout, around.stderr))
    for name, file in (("out", out), ("err", err)):
        if file:
            lines += [f"{name}={file}", f'begin "${name}" "$mode"']
    lines += [_redirections(out, err), _RUN.strip()]
    return "\n".join(lines)


def _redirections(out: str, err: str) -> str:
    if out and (not err or err == out):
        return 'exec > >(copy "$out") 2>&1; copies=$!'
    of_err = 'exec 2> >(copy "$err" >&2); copies="${copies-} $!"'
    return f'exec > >(copy "$out"); copies=$!\n{of_err}' if out else of_err


def _mode(append: str) -> str:
    """Return what becomes of a file that is there, as a word of bash."""
    return '"$([ "$GPU_ARBITER_ATTEMPT" -gt 0 ] && echo append)"' if append == "again" else append


def _variables(around: Around) -> dict[str, str]:
    """Return the variables of the script's environment as words of bash, in an order in which they can be set."""
    quoted = {name: shlex.quote(value) for name, value in around.variables.items()}
    if around.array:
        ids = {
            "SLURM_JOB_ID": '"$GPU_ARBITER_JOB"',
            "SLURM_ARRAY_JOB_ID": '"${GPU_ARBITER_JOB%.*}"',
            "SLURM_ARRAY_TASK_ID": '"$GPU_ARBITER_ARRAY_INDEX"',
            "SLURM_ARRAY_TASK_COUNT": str(len(around.array)),
            "SLURM_ARRAY_TASK_MIN": str(around.array[0]),
            "SLURM_ARRAY_TASK_MAX": str(around.array[-1]),
            "SLURM_ARRAY_TASK_STEP": str(around.array_step),
        }
    else:
        ids = {"SLURM_JOB_ID": '"${GPU_ARBITER_JOB%.*}"'}
    return {
        **ids,
        "SLURM_JOBID": '"$SLURM_JOB_ID"',
        "SLURM_JOB_NAME": shlex.quote(around.name),
        "SLURM_JOB_USER": shlex.quote(around.user),
        "SLURM_SUBMIT_DIR": shlex.quote(around.submit_dir),
        "SLURMD_NODENAME": '"${HOSTNAME%%.*}"',
        "SLURM_JOB_NODELIST": '"$SLURMD_NODENAME"',
        "SLURM_NODELIST": '"$SLURMD_NODENAME"',
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_NNODES": "1",
        "SLURM_GPUS_ON_NODE": '"$GPU_ARBITER_GPUS"',
        "SLURM_JOB_GPUS": '"${CUDA_VISIBLE_DEVICES-}"',
        "SLURM_RESTART_COUNT": '"$GPU_ARBITER_ATTEMPT"',
        **quoted,
    }


def pattern(text: str, around: Around) -> str:
    """Return the name of a file as a word of bash; what ``%`` stands for is known when the job starts.

    Raises
    ------
    Fault
        For a letter after ``%`` that has no meaning.
    """
    known = {
        "A": "${SLURM_ARRAY_JOB_ID-$SLURM_JOB_ID}",
        "a": "${SLURM_ARRAY_TASK_ID-4294967294}",  # as Slurm has it without an array
        "J": "$SLURM_JOB_ID",
        "j": "$SLURM_JOB_ID",
        "N": "$SLURMD_NODENAME",
        "n": "0",
        "t": "0",
        "s": "batch",
    }
    words, end = [], 0
    for found in _PATTERN.finditer(text):
        words.append(_literal(text[end : found.start()]))
        width, letter = found.groups()
        end = found.end()
        if letter in known and letter in "ant" and width:
            words.append(f'"$(printf %0{width[-2:]}d "{known[letter]}")"')
        elif letter in known:
            words.append(f'"{known[letter]}"')
        elif letter in "xu%" and letter:
            words.append(_literal({"x": around.name, "u": around.user, "%": "%"}[letter]))
        else:
            letters = ", ".join(f"%{each}" for each in sorted((*known, "x", "u")))
            raise usage(
                f"{text!r} names a file by %{letter}, which has no meaning here", f"write %%, or one of {letters}"
            )
    return "".join((*words, _literal(text[end:]))) or "''"


def _literal(text: str) -> str:
    return shlex.quote(text) if text else ""
