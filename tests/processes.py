"""Modules of the tests run in processes of their own, which may have several devices and compute together."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax

ROOT = Path(__file__).parents[1]


def environment(num_devices):
    flags = f"--xla_force_host_platform_device_count={num_devices}"
    return {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}


def run_on_devices(module, *arguments, num_devices=4, timeout=900):
    """Run a module in a process with so many devices."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    subprocess.run(command, env=environment(num_devices), check=True, timeout=timeout)


def module_command(module, *arguments_and_place):
    """Arguments of the interpreter for one of two processes."""
    *arguments, port, number = arguments_and_place
    return ["-m", module, *arguments, "--processes", 2, "--port", port, "--process", number]


def joined(parser):
    """Arguments of such a module, in double precision and with its process joined to the others, if there are any."""
    parser.add_argument("folder", type=Path)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, default=0)
    parser.add_argument("--port", type=int)
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    if arguments.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{arguments.port}", arguments.processes, arguments.process)
    return arguments


def run_in_two_processes(command, timeout=900, ends=(0, 0), cwd=ROOT):
    """Run two processes of two devices each, and stop both where one ends as it should not.

    :param command: arguments of the interpreter, from the port at which they meet and the number of the process.
    :param ends: how each should end; ``None`` for one that is stopped once the other has ended.
    :return: what they printed.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    commands = [[sys.executable, *map(str, command(port, number))] for number in range(2)]
    options = {"env": environment(2), "cwd": cwd, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **options) for command in commands]
    printed = ["", ""]
    try:
        for number, end in enumerate(ends):
            if end is not None:
                printed[number], _ = processes[number].communicate(timeout=timeout)
                assert processes[number].returncode == end
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return printed
