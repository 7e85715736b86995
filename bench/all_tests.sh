#!/usr/bin/env bash
# All tests with nothing left out: every release where `bash tests/run.sh` takes the first and the last
# (chats, failures and sequences over HTTP), 208 kills instead of 104. Arguments go to pytest.
# Prints the seconds of the parts at the end; against them stands the bound of `bash tests/run.sh`, 720.
VISION_EXP_TEST_ALL=1 exec bash "$(dirname -- "${BASH_SOURCE[0]}")/../tests/run.sh" "$@"
