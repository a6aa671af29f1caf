"""The command dsa-engine on several ranks: torchrun … command.py [--odd HOST WHAT VALUE] generate|chat|doctor …

With ``--odd`` one node differs from the others: it has VALUE in the place of the file or folder WHAT.
"""

import socket
import subprocess
import sys

if sys.argv[1] == "--odd":
    host, what, value = sys.argv[2:5]
    del sys.argv[1:5]
    if socket.gethostname() == host:
        sys.dont_write_bytecode = True  # it would be another file's for all other processes
        subprocess.run(["mount", "--bind", value, what], check=True)  # each node has its own list of mounts

from dsa_engine.cli import main

main()
