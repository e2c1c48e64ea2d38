"""The process that the engine runs in: loads it, obeys the server, reports what comes of it.

Started by engine_link.py, with its end of a socket pair as a number on the command line. Only this
process touches a GPU. It ends when a step fails, as nobody can know what state the device is in
then; and when the server has gone, whatever it is doing.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import queue
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NoReturn

from cuengine import loading
from cuengine.child_process import end_with_parent
from cuengine.engine import Engine
from cuengine.errors import CuengineError, ModelError, RequestError
from cuengine.grammar import Grammar
from cuengine.scheduler import Chunk
from cuengine.shortage import shortage
from cuengine.wire import (
    Abort,
    Add,
    AddBeams,
    Admitted,
    Command,
    FinishSample,
    FrameReader,
    Launching,
    LoadFailed,
    Log,
    Look,
    News,
    Ready,
    Report,
    Seen,
    Start,
    WireError,
    frame,
)

logger = logging.getLogger("cuengine")

GRAMMAR_THREADS = 2


@dataclass(slots=True)
class Compiled:
    """What came of a request's grammar, or the error that came of it."""

    request: Add
    result: Grammar | Exception | None


Order = Command | Compiled
"""What the loop is to do: the server's commands, and what its own threads have ready."""


class Connection:
    """The socket to the server. A thread reads it, so that its end is noticed at any time."""

    def __init__(self, peer: socket.socket) -> None:
        peer.set_inheritable(False)  # its end would not be noticed while a compiler has it
        self._peer = peer
        self._sending = threading.Lock()
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="cuengine-commands", daemon=True).start()

    def send(self, report: Report) -> None:
        data = frame(report)
        try:
            with self._sending:
                self._peer.sendall(data)
        except OSError:
            os._exit(0)  # the server has gone

    def put(self, order: Order) -> None:
        """Have the loop do something, from any thread."""
        self._orders.put(order)

    def receive(self, *, wait: bool) -> Order | None:
        """What to do next; None where there is nothing, and nobody wants to wait for it."""
        try:
            return self._orders.get(block=wait)
        except queue.Empty:
            return None

    def _read(self) -> None:
        reader: FrameReader[Command] = FrameReader(Command)
        status = 0
        try:
            while data := self._peer.recv(1 << 16):
                for command in reader.feed(data):
                    self.put(command)
        except WireError as error:
            print(f"cuengine: the engine cannot read its commands: {error}", file=sys.stderr)
            status = 1
        except OSError:
            pass
        os._exit(status)


class LogHandler(logging.Handler):
    """Hands log records to the server, whose settings say how they look, and says who speaks."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection
        self._formatter = logging.Formatter()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            exception = record.exc_info and self._formatter.formatException(record.exc_info)
            message = f"engine: {record.getMessage()}"
            self._connection.send(
                Log(record.name, record.levelno, message, record.created, exception or None)
            )
        except Exception:
            self.handleError(record)


class Loop:
    """Steps while there is work, and does what comes in between two steps.

    running    keys of the requests in the last step, as the server knows them
    compiling  keys of requests that wait for their grammar
    """

    def __init__(self, engine: Engine, connection: Connection) -> None:
        self._engine = engine
        self._connection = connection
        self._running: set[str] = set()
        self._compiling: set[str] = set()
        self._num_steps = 0
        self._threads = ThreadPoolExecutor(GRAMMAR_THREADS, "cuengine-grammar")
        engine.before_launch = self._announce

    def run(self) -> NoReturn:
        """Passes on whatever a step raises."""
        while True:
            self.turn()

    def turn(self) -> None:
        """Do all that one is told, waiting for it if there is nothing else to do; then a step."""
        engine = self._engine
        obeyed = False
        while True:
            wait = not obeyed and not engine.has_unfinished()
            order = self._connection.receive(wait=wait)
            if order is None:
                break
            self._obey(order)
            obeyed = True
        outputs = engine.step()
        if outputs or obeyed or engine.num_completed_steps != self._num_steps:
            self._num_steps = engine.num_completed_steps
            self._connection.send(News(outputs, engine.stats(), self._num_steps))

    def _announce(self, chunks: list[Chunk]) -> None:
        """Let the server know who will have run if the step is the last."""
        keys = {chunk.sequence.request.request_id for chunk in chunks}
        if keys != self._running:
            self._running = keys
            step = self._engine.stats().num_steps + 1
            self._connection.send(Launching(step, sorted(keys)))

    def _obey(self, order: Order) -> None:
        match order:
            case Add() if order.params.structured_outputs is not None:
                self._compiling.add(order.key)
                self._threads.submit(self._compile, order)
            case Add() | AddBeams():
                self._admit(order, None)
            case Compiled():
                if order.request.key in self._compiling:
                    self._compiling.remove(order.request.key)
                    self._admit(order.request, order.result)
            case FinishSample():
                self._engine.finish_sequence(order.key, order.index)
            case Abort():
                self._compiling.discard(order.key)
                self._engine.abort(order.key)
            case Look():
                self._connection.send(Seen(self._engine.view()))
            case Start():
                raise WireError("the engine has been started before")

    def _compile(self, request: Add) -> None:
        """On a thread: however long it takes, no step waits for it."""
        result: Grammar | Exception | None
        try:
            result = self._engine.compile_grammar(request.params)
        except Exception as error:
            result = error
        self._connection.put(Compiled(request, result))

    def _admit(self, request: Add | AddBeams, grammar: Grammar | Exception | None) -> None:
        try:
            if isinstance(grammar, Exception):
                raise grammar
            self._engine.add_request(
                request.key,
                request.prompt_token_ids,
                request.params,
                priority=request.priority,
                cache_salt=request.cache_salt,
                grammar=grammar,
                progress=request.progress if isinstance(request, Add) else None,
            )
        except RequestError as error:
            self._connection.send(Admitted(request.key, str(error), error.param, error.code))
        else:
            self._connection.send(Admitted(request.key))


def load_failed(error: Exception) -> LoadFailed | None:
    """What the server is told of an error that needs no traceback; None for any other."""
    if isinstance(error, ModelError):
        return LoadFailed("ModelError", str(error))
    if isinstance(error, CuengineError):  # a setting, or something that is not installed
        return LoadFailed("ConfigError", str(error))
    short_of = shortage(error)
    return None if short_of is None else LoadFailed("ConfigError", short_of)


def main() -> int:
    end_with_parent()
    faulthandler.enable()
    connection = Connection(socket.socket(fileno=int(sys.argv[1])))
    start = connection.receive(wait=True)
    assert isinstance(start, Start)
    logging.getLogger().addHandler(LogHandler(connection))
    for name, level in start.log_levels.items():
        logging.getLogger(name).setLevel(level)
    try:
        engine = loading.load_engine(start.config)
    except Exception as error:
        failed = load_failed(error)
        if failed is None:
            raise
        connection.send(failed)
        return 1
    connection.send(Ready(engine.max_model_len, engine.pool.num_blocks, engine.model.vocab_size))
    try:
        Loop(engine, connection).run()
    except Exception:
        logger.exception("The engine failed")
    return 1


if __name__ == "__main__":
    code = main()
    # Whatever else may still run here is of no use to anybody.
    sys.stderr.flush()
    os._exit(code)
