"""The version of Tandem, in its only place.

Read by setup.cfg (without importing anything), by `--version` and by the handshake, whose version must be
equal on both nodes. It must stay a plain literal, so that a checkout that was never installed has it too.
"""

VERSION = "0.1.0"
