"""A small hub over HTTP that keeps what is asked of it and what it is sent, for huggingface_hub."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "a" * 40  # of every branch


class FakeHub:
    """Repositories: `served` are files to read, `pushed` what came up; `private` by name."""

    def __init__(self):
        self.served: dict[str, Path] = {}  # repo -> folder
        self.private: dict[str, bool] = {}
        self.pushed: dict[str, bytes] = {}  # path in the repo -> content
        self.requests: list[tuple[str, str]] = []  # method, path
        self.blobs: dict[str, bytes] = {}  # sha256 -> content, by LFS
        self.url = ""


@contextmanager
def fake_hub():
    """A hub on a free port for the life of the block; its address is `url`."""
    hub = FakeHub()
    handler = type("Handler", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, body: dict | list | bytes, status: int = 200, head: bool = False, **headers):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if not head:
            self.wfile.write(data)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_HEAD(self):
        self.read(head=True)

    def do_GET(self):
        self.read()

    def read(self, head: bool = False):
        """A file of a served repository, or what is known of a repository."""
        self.hub.requests.append((self.command, self.path))
        path = self.path.split("?")[0]
        if path.startswith("/api/models/"):
            name = "/".join(path.removeprefix("/api/models/").split("/")[:2])
            private = self.hub.private.get(name, False)
            if "/tree/" in path:
                return self.answer([])
            files = self.hub.served.get(name, Path("/nonexistent")).glob("*")
            return self.answer(
                {
                    "id": name,
                    "private": private,
                    "sha": COMMIT,
                    "siblings": [{"rfilename": file.name} for file in files],
                }
            )
        if path.count("/") < 5:
            return self.answer({}, 404, head)
        owner, name, _, revision, *rest = path.strip("/").split("/")
        commit = revision if len(revision) == len(COMMIT) else COMMIT
        file = self.hub.served.get(f"{owner}/{name}", Path("/nonexistent")) / "/".join(rest)
        if not file.is_file():
            return self.answer(b"", 404, head, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
        data = file.read_bytes()
        self.answer(data, 200, head, X_Repo_Commit=commit, ETag=hashlib.sha1(data).hexdigest())

    def do_POST(self):
        self.hub.requests.append((self.command, self.path))
        body, path = self.body(), self.path.split("?")[0]
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            wanted = asked.get("private", asked.get("visibility") == "private")
            private = self.hub.private.setdefault(name, wanted)
            return self.answer({"url": f"{self.hub.url}/{name}", "id": name, "private": private})
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if path.endswith("/preupload/main"):
            files = [
                {
                    "path": f["path"],
                    "shouldIgnore": False,
                    "uploadMode": "lfs" if f["path"].endswith("safetensors") else "regular",
                }
                for f in json.loads(body)["files"]
            ]
            return self.answer({"files": files})
        if path.endswith("/info/lfs/objects/batch"):
            objects = [
                {
                    "oid": o["oid"],
                    "size": o["size"],
                    "actions": {
                        "upload": {"href": f"{self.hub.url}/blob/{o['oid']}", "header": {}}
                    },
                }
                for o in json.loads(body)["objects"]
            ]
            return self.answer({"transfer": "basic", "objects": objects})
        if path.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.hub.pushed[line["value"]["path"]] = base64.b64decode(
                        line["value"]["content"]
                    )
                if line["key"] == "lfsFile":
                    self.hub.pushed[line["value"]["path"]] = self.hub.blobs[line["value"]["oid"]]
            name, commit = "/".join(path.split("/")[3:5]), "c" * 40
            return self.answer(
                {
                    "commitUrl": f"{self.hub.url}/{name}/commit/{commit}",
                    "commitOid": commit,
                    "hookOutput": "",
                }
            )
        self.answer({"error": "not found"}, 404)

    def do_PUT(self):
        self.hub.requests.append((self.command, self.path))
        self.hub.blobs[self.path.rsplit("/", 1)[-1]] = self.body()
        self.answer(b"")
