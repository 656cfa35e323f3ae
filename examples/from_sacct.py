"""Turns Slurm's accounting into a trace for `gpu-arbiter simulate`: the jobs that had GPUs, each with its run time.

sacct -a -X -P -n -S now-14days -s CD,F,TO -o JobID,User,Submit,ElapsedRaw,AllocTRES | python3 from_sacct.py > trace.csv
"""

import re
import sys
from datetime import datetime

rows = []
for line in sys.stdin:
    job, user, submit, elapsed_s, resources = line.strip().split("|")
    gpus = re.search(r"gres/gpu=(\d+)", resources)
    if gpus and int(elapsed_s):
        rows.append((datetime.fromisoformat(submit).timestamp(), job, gpus[1], elapsed_s, user))
print("job_id,submit_s,gpus,duration_s,tenant")
for submit_s, job, gpus, elapsed_s, user in sorted(rows):
    print(f"{job},{submit_s - min(rows)[0]:.0f},{gpus},{elapsed_s},{user}")
