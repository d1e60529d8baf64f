"""A Python that has imported torch and the library already: its processes are forked from a server.

To import them takes longer than what most tests of processes do. The executable of `warm_python`
takes a command line of Python (-u, then -m and a module or a file, then arguments) and runs it with
the environment, the folder, the streams and the exit status of a process that is started fresh. So
torchrun's ranks can be such processes, too: it starts them with PYTHON_EXEC.

This file is also what the executable runs: without the imports that it is there to spare.
"""

import json
import os
import signal
import socket
import sys
from functools import cache

PRELOADED = (
    "dtensor_llm.launch",
    "dtensor_llm.metrics",
    "dtensor_llm.parity.meshes",
    "dtensor_llm.parity.recording",
    "parity_tests.faults",
    "reference.training",
    "torch.distributed.launcher.api",  # most of torchrun
)


@cache
def warm_python() -> str:
    """Path of the executable; the server lives as long as this process."""
    import atexit
    import multiprocessing
    import shlex
    import tempfile
    from pathlib import Path

    from dtensor_llm.worlds.processes_spawn import PRELOAD

    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    address = str(Path(folder.name) / "socket")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)  # that of spawned worlds, which may be there already
    context.Process(target=serve, args=(listener,), daemon=True).start()
    listener.close()
    path = Path(folder.name) / "python"
    path.write_text(
        f'#!/bin/sh\nexec {shlex.join([sys.executable, "-ISs", __file__, address])} "$@"\n'
    )
    path.chmod(0o755)
    return str(path)


# The executable


def ask(address: str, arguments: list[str]) -> int:
    """Have the server run a command line in place of this process; its exit status."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [b"\0"], [0, 1, 2])
        folder = os.getcwd()  # noqa: PTH109 - pathlib takes longer to import than all the rest
        request = {"arguments": arguments, "folder": folder, "environment": dict(os.environ)}
        server.sendall(json.dumps(request).encode() + b"\n")
        status = int(server.recv(16) or 1)
    if status < 0:
        os.kill(os.getpid(), -status)
    return status


# The server


def serve(listener: socket.socket) -> None:
    """Fork for each connection, until the process that has started this one is gone."""
    import contextlib
    import gc
    import importlib
    from multiprocessing import connection, parent_process

    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    parent = parent_process()
    assert parent is not None
    while parent.sentinel not in connection.wait([listener, parent.sentinel]):
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            answer(client)
        client.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def answer(client: socket.socket) -> None:
    """Run what is asked for in a process of its own, which ends where the client does."""
    import select

    _, streams, _, _ = socket.recv_fds(client, 1, 3)
    request = json.loads(client.makefile().readline())
    lives, lived = os.pipe()
    pid = os.fork()
    if pid == 0:
        client.close()
        os.close(lives)
        be(request, streams)
    os.close(lived)
    for stream in streams:
        os.close(stream)
    ready, _, _ = select.select([lives, client.fileno()], [], [])
    if lives not in ready:
        os.kill(pid, signal.SIGTERM)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if lives in ready:
        client.sendall(str(status).encode())
    os._exit(0)


def be(request: dict, streams: list[int]) -> None:
    """Become the process that was asked for."""
    import io
    import runpy
    import traceback
    from pathlib import Path

    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as long as the process lives
    sys.stdout, sys.stderr = (  # as -u has it
        io.TextIOWrapper(io.FileIO(number, "w", closefd=False), "utf-8", write_through=True)
        for number in (1, 2)
    )
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = request["arguments"]
    if sys.argv[0] == "-u":
        del sys.argv[0]
    status = 1
    try:
        if sys.argv[0] == "-m":
            sys.path.insert(0, request["folder"])
            del sys.argv[0]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
            runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        if isinstance(end.code, int) or end.code is None:
            status = end.code or 0
        else:
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    os._exit(status)


if __name__ == "__main__":
    sys.exit(ask(sys.argv[1], sys.argv[2:]))
