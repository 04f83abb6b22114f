"""Files of students and libraries: those of ``configs/students``, and puzzletron's."""

from __future__ import annotations

from pathlib import Path

from megatron_zb.distill import puzzletron
from megatron_zb.distill.puzzletron import BlockConfigs
from megatron_zb.distill.student import Library, StudentConfig, TeacherShape, library
from megatron_zb.measured import config

Student = StudentConfig | BlockConfigs


def read_student(path: Path) -> Student:
    """Read a file; JSON is puzzletron's.

    Raises:
        UsageError: the file or a field of it is wrong.
    """
    if path.suffix == ".json":
        return puzzletron.read(path)
    return config.read(path, StudentConfig)


def library_of(student: Student, teacher: TeacherShape) -> Library:
    """Return the candidates of every block, in the order of the blocks.

    Raises:
        UsageError: a block does not fit the teacher.
    """
    if isinstance(student, BlockConfigs):
        return student.library(teacher)
    return library(student, teacher)
