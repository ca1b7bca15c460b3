"""The task of each configuration, and of each program that trains."""

from typing import Any

from train.config.common import CommonConfig
from train.config.entries import Config, DiTRunConfig
from train.tasks.diffusion import DiffusionTask
from train.tasks.language import LanguageTask
from train.tasks.task import Task

TASKS: dict[type[CommonConfig], type[Task[Any]]] = {Config: LanguageTask, DiTRunConfig: DiffusionTask}


def task_of(config: CommonConfig) -> Any:
    """Return the class of a configuration's task: call it with the configuration and a mesh."""
    return TASKS[type(config)]


def task_named(entry: str) -> Any:
    """Return the class of the task that a program trains."""
    return next(task for task in TASKS.values() if task.entry == entry)
