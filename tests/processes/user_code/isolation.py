import json
import os
import socket
import time

config = json.loads(os.environ["TF_CONFIG"])
workers = [address.rpartition(":") for address in config["cluster"]["worker"]]
host, _, port = workers[config["task"]["index"]]
server = socket.create_server((host, int(port)), reuse_port=True)
until = time.monotonic() + 30
for host, _, port in workers:
    while True:
        try:
            socket.create_connection((host, int(port))).close()
            break
        except OSError:
            assert time.monotonic() < until, "they do not reach each other"
            time.sleep(0.01)
for _ in workers:  # whoever ends before it was reached could not be
    server.accept()
print("in", os.readlink("/proc/self/ns/net"), [name for _, name in socket.if_nameindex() if not name.startswith("lo")])
try:
    socket.create_connection(("192.0.2.1", 9), timeout=5)
except OSError as error:
    print("out", error.strerror)
