"""The other side of `ahead`: answers pickled calls on standard input until it is closed.

Guarantees: whatever a plan function prints goes to standard error, never among the answers; an
interrupt from the keyboard is the training process's affair; a plan that is under way when the
training process ends is left at once.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from typing import Any, BinaryIO

from mcore_batching.planning.ahead import PlanAheadError

SECONDS_BETWEEN_LOOKS = 1.0


def serve() -> None:
    """Read a function, then its arguments again and again; answer each with result or error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    questions = sys.stdin.buffer
    try:
        function = pickle.load(questions)
    except Exception as error:
        # The reason travels; what could not be imported here cannot.
        reason = f"the planning process cannot import the plan function: {error!r}"
        _answer(answers, False, PlanAheadError(reason))
        return
    _answer(answers, True, None)
    while True:
        try:
            arguments, keywords = pickle.load(questions)
        except EOFError:
            return
        try:
            succeeded, result = True, function(*arguments, **keywords)
        except Exception as error:
            succeeded, result = False, error
        _answer(answers, succeeded, result)


def _end_with(training_process: int) -> None:
    """A closed standard input is seen between plans; this, also during one."""
    while os.getppid() == training_process:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    os._exit(0)


def _answer(answers: BinaryIO, succeeded: bool, result: Any) -> None:
    try:
        text = pickle.dumps((succeeded, result))
        # Some exceptions can be written and not read.
        pickle.loads(text)
    except Exception as error:
        reason = f"what the plan function gave cannot be pickled ({error!r}): {result!r:.500}"
        text = pickle.dumps((False, PlanAheadError(reason)))
    answers.write(text)
    answers.flush()
