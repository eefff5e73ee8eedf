"""What is saved: JSON documents with a schema, and run folders written in one step.

This package knows documents (plain dictionaries and lists), files and folders, and no class of
headwise: what can be saved knows its own document and calls this package, so that a new thing to
save adds nothing here but a schema. docs/format.md describes the formats. Nothing is pickled.
"""

from __future__ import annotations

from headwise.artifacts._documents import COMPARISON_FORMAT as COMPARISON_FORMAT
from headwise.artifacts._documents import COMPARISON_VERSION as COMPARISON_VERSION
from headwise.artifacts._documents import HEADS_FORMAT as HEADS_FORMAT
from headwise.artifacts._documents import HEADS_VERSION as HEADS_VERSION
from headwise.artifacts._documents import MODEL_FORMAT as MODEL_FORMAT
from headwise.artifacts._documents import MODEL_VERSION as MODEL_VERSION
from headwise.artifacts._documents import PLAN_FORMAT as PLAN_FORMAT
from headwise.artifacts._documents import PLAN_VERSION as PLAN_VERSION
from headwise.artifacts._documents import REDUNDANCY_FORMAT as REDUNDANCY_FORMAT
from headwise.artifacts._documents import REDUNDANCY_VERSION as REDUNDANCY_VERSION
from headwise.artifacts._documents import ROLES_FORMAT as ROLES_FORMAT
from headwise.artifacts._documents import ROLES_VERSION as ROLES_VERSION
from headwise.artifacts._documents import RUN_FORMAT as RUN_FORMAT
from headwise.artifacts._documents import RUN_VERSION as RUN_VERSION
from headwise.artifacts._documents import STATISTICS_FORMAT as STATISTICS_FORMAT
from headwise.artifacts._documents import STATISTICS_VERSION as STATISTICS_VERSION
from headwise.artifacts._documents import check_document as check_document
from headwise.artifacts._documents import encode_document as encode_document
from headwise.artifacts._documents import read_document as read_document
from headwise.artifacts._documents import replace_file as replace_file
from headwise.artifacts._documents import schema as schema
from headwise.artifacts._documents import write_document as write_document
from headwise.artifacts._facts import run_document as run_document
from headwise.artifacts._facts import versions as versions
from headwise.artifacts._folders import NEW as NEW
from headwise.artifacts._folders import Target as Target
from headwise.artifacts._folders import recover as recover
from headwise.artifacts._runs import HEADS_FILE as HEADS_FILE
from headwise.artifacts._runs import REPORT_FILE as REPORT_FILE
from headwise.artifacts._runs import RUN_FILE as RUN_FILE
from headwise.artifacts._runs import Run as Run
from headwise.artifacts._runs import Savable as Savable
from headwise.artifacts._runs import check_folder as check_folder
from headwise.artifacts._runs import read_run as read_run
from headwise.artifacts._runs import write_run as write_run
from headwise.artifacts._tensors import read_tensors as read_tensors
from headwise.artifacts._tensors import write_tensors as write_tensors

__all__ = [
    "COMPARISON_FORMAT",
    "COMPARISON_VERSION",
    "HEADS_FILE",
    "HEADS_FORMAT",
    "HEADS_VERSION",
    "MODEL_FORMAT",
    "MODEL_VERSION",
    "NEW",
    "PLAN_FORMAT",
    "PLAN_VERSION",
    "REDUNDANCY_FORMAT",
    "REDUNDANCY_VERSION",
    "REPORT_FILE",
    "ROLES_FORMAT",
    "ROLES_VERSION",
    "RUN_FILE",
    "RUN_FORMAT",
    "RUN_VERSION",
    "STATISTICS_FORMAT",
    "STATISTICS_VERSION",
    "Run",
    "Savable",
    "Target",
    "check_document",
    "check_folder",
    "encode_document",
    "read_document",
    "read_run",
    "read_tensors",
    "recover",
    "replace_file",
    "run_document",
    "schema",
    "versions",
    "write_document",
    "write_run",
    "write_tensors",
]
