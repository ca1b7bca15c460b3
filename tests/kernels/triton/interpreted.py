"""A program that prints the numbers of Triton's interpreter.

It must be chosen before Triton is imported.
"""

import json
import sys

from tests.kernels import attention_cases, linear_cases, pointwise_cases
from tests.kernels.delta import cases as delta_cases

REPORTS = {
    "attention": attention_cases.report,
    "pointwise": pointwise_cases.report,
    "linear": linear_cases.report,
    "far": linear_cases.report_far,
    "delta": delta_cases.report,  # last: it leaves a setting behind
}


if __name__ == "__main__":
    json.dump({name: REPORTS[name]() for name in sys.argv[1:]}, sys.stdout)
