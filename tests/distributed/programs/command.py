"""The command dsa-engine on several ranks: torchrun … command.py [--odd HOST WHAT VALUE] generate|chat|doctor …

With ``--odd`` one machine differs from the others. WHAT is ``clock``, and its clock is VALUE seconds fast; or a file or
folder, in whose place it has VALUE.
"""

import socket
import subprocess
import sys
import time

if sys.argv[1] == "--odd":
    host, what, value = sys.argv[2:5]
    del sys.argv[1:5]
    if socket.gethostname() != host:
        pass
    elif what == "clock":
        clock = time.time
        time.time = lambda: clock() + float(value)
    else:
        sys.dont_write_bytecode = True  # it would be another file's for all other processes
        subprocess.run(["mount", "--bind", value, what], check=True)  # each machine has its own list of mounts

from dsa_engine.cli import main

main()
