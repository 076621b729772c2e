"""A local copy of the Hub: enough of its HTTP interface for the real client to push to it and pull from it.

    with LoopbackHub(folder) as hub:
        run(..., env={"HF_ENDPOINT": hub.url, "HF_TOKEN": "me-token"})
        hub.files("me/ticket")              # the files of the main branch, by name
        hub.requests                        # the requests of the client: [("POST", "/api/repos/create"), ...]

Large files are sent by LFS (if the client has HF_HUB_DISABLE_XET=1) or by Xet. For Xet, the client gets a `local://`
address, and `hf_xet` then stores the files in a folder itself.
A user `me` has the token `me-token`, and can write to `me/...` only.
"""

import base64
import hashlib
import json
import re
import socket
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = (".safetensors", ".png")  # sent by LFS or Xet; other files are sent with the commit


@dataclass
class Blob:
    data: bytes | None  # None: in the Xet storage
    size: int
    oid: str  # as the client computes it: SHA-256 for large files, git's SHA-1 for others
    large: bool
    xet: str | None = None


@dataclass
class Repo:
    private: bool
    branches: dict[str, list[str]] = field(default_factory=dict)  # commits, oldest first
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)

    def commit_of(self, revision: str) -> str | None:
        if revision in self.branches:
            return self.branches[revision][-1]
        return revision if revision in self.commits else None

    def add(self, branch: str, files: dict[str, Blob], message: str) -> str:
        parent = self.branches.get(branch, [""])[-1]
        names = "".join(f"{name} {blob.oid}\n" for name, blob in sorted(files.items()))
        sha = hashlib.sha1(f"{parent}\n{message}\n{names}".encode()).hexdigest()
        self.commits[sha], self.messages[sha] = files, message
        self.branches.setdefault(branch, []).append(sha)
        return sha


class LoopbackHub:
    def __init__(self, folder: Path) -> None:
        self.store = folder / "xet_store"
        self.repos: dict[str, Repo] = {}
        self.uploads: dict[str, bytes] = {}  # large files by SHA-256, also those that no commit names
        self.requests: list[tuple[str, str]] = []
        self.cut: list[str] = []  # patterns of "METHOD path": each interrupts the next matching request
        self.lock = threading.Lock()

    def __enter__(self) -> "LoopbackHub":
        handler = type("Handler", (Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.server.shutdown()
        self.server.server_close()

    def put(self, name: str, files: dict[str, bytes]) -> None:
        """Create a repository with these files."""
        repo = self.repos[name] = Repo(private=False)
        repo.add("main", {file: _regular(data) for file, data in files.items()}, "initial commit")

    def files(self, name: str, revision: str = "main") -> dict[str, Blob]:
        repo = self.repos[name]
        return repo.commits[repo.branches[revision][-1]]

    def commits(self, name: str, branch: str = "main") -> list[str]:
        """Return the messages of the commits of a branch, without the first, which is empty."""
        return [self.repos[name].messages[sha] for sha in self.repos[name].branches[branch][1:]]

    def asked(self, pattern: str) -> list[str]:
        """Return the requests since the last `requests.clear()` that match a pattern, as "METHOD path"."""
        return [f"{way} {path}" for way, path in self.requests if re.search(pattern, f"{way} {path}")]

    def xet_hash(self, sha256: str) -> str | None:
        """Return the name of a file in the Xet storage, from the shards that the client has written there.

        A shard is a sequence of 48-byte records: a header; for each file a head (hash, flags, number of segments),
        its segments, as many proofs (if bit 31 is set), its SHA-256 (if bit 30 is set); at the end a head of ones.
        """

        def in_hex(digest: bytes) -> str:  # four little-endian words
            return "".join(digest[i : i + 8][::-1].hex() for i in range(0, 32, 8))

        for path in self.store.rglob("xorbs/shards/*.mdb"):
            data, place = path.read_bytes(), 48
            while (name := data[place : place + 32]) != b"\xff" * 32:
                flags = int.from_bytes(data[place + 32 : place + 36], "little")
                segments = int.from_bytes(data[place + 36 : place + 40], "little")
                place += 48 * (1 + segments * (2 if flags >> 31 & 1 else 1))
                if flags >> 30 & 1:
                    if in_hex(data[place : place + 32]) == sha256:
                        return in_hex(name)
                    place += 48
        return None


def _regular(data: bytes) -> Blob:
    return Blob(data, len(data), hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(), large=False)


@dataclass
class Refused(Exception):
    """An error that is sent as the answer."""

    status: int
    message: str
    code: str = ""
    headers: dict[str, str] = field(default_factory=dict)


class Handler(BaseHTTPRequestHandler):
    hub: LoopbackHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        pass

    def do_ANY(self) -> None:
        address = urlsplit(self.path)
        path, self.query = unquote(address.path), parse_qs(address.query)
        self.hub.requests.append((self.command, path))
        for pattern in self.hub.cut:
            if re.search(pattern, f"{self.command} {path}"):
                self.hub.cut.remove(pattern)
                self._read_body(0.5)
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
        body = self._read_body()
        try:
            for pattern, answer in ROUTES.items():
                if found := re.fullmatch(pattern, f"{self.command} {path}"):
                    with self.hub.lock:
                        answer(self, body, **found.groupdict())
                    return
            raise Refused(404, f"no such address: {self.command} {path}", "EntryNotFound")
        except Refused as refused:
            named = {"X-Error-Message": refused.message, "X-Error-Code": refused.code, **refused.headers}
            self.answer({"error": refused.message}, refused.status, named)

    do_GET = do_HEAD = do_POST = do_PUT = do_ANY

    def _read_body(self, share: float = 1.0) -> bytes:
        """Read the body of the request, or only the first part of it. LFS uploads come in chunks."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(share * int(self.headers.get("Content-Length") or 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(int(share * size))
            if share < 1:
                return body
            self.rfile.readline()
        self.rfile.readline()
        return body

    def answer(self, data: object = None, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    # -- access rights -----------------------------------------------------------------------------

    def user(self) -> str | None:
        header = self.headers.get("Authorization")
        if header is None:
            return None
        if not (found := re.fullmatch(r"Bearer (\w+)-token", header)):
            raise Refused(401, "Invalid credentials in Authorization header")
        return found[1]

    def repo(self, name: str, write: bool = False) -> Repo:
        """Return a repository that the user may see. Without a token, a missing repository is an error 401 too."""
        user, repo = self.user(), self.hub.repos.get(name)
        mine = user == name.split("/")[0]
        if repo is None or (repo.private and not mine):
            if user is None:
                raise Refused(401, "Invalid username or password.")
            raise Refused(404, "Repository not found", "RepoNotFound")
        if write and not mine:
            raise Refused(403, f"Forbidden: you must have write access to {name}")
        return repo

    def revision(self, name: str, revision: str) -> tuple[Repo, str]:
        repo = self.repo(name)
        if (sha := repo.commit_of(revision)) is None:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return repo, sha

    # -- push --------------------------------------------------------------------------------------

    def create(self, body: bytes) -> None:
        wanted, user = json.loads(body), self.user()
        if user is None:
            raise Refused(401, "Invalid username or password.")
        owner = wanted.get("organization") or user
        name = f"{owner}/{wanted['name']}"
        if owner != user:
            raise Refused(403, f'You don\'t have the rights to create a model under the namespace "{owner}"')
        if name not in self.hub.repos:
            private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
            self.hub.put(name, {})
            self.hub.repos[name].private = private
        self.answer({"url": f"{self.hub.url}/{name}", "id": name})

    def validate_card(self, body: bytes) -> None:
        if not re.match(r"---\n.*?\n---\n", json.loads(body)["content"], re.DOTALL):
            raise Refused(400, "no metadata")
        self.answer({"errors": [], "warnings": []})

    def branch(self, body: bytes, name: str, branch: str) -> None:
        repo = self.repo(name, write=True)
        if branch in repo.branches:
            raise Refused(409, f"Reference already exists: {branch}")
        repo.branches[branch] = list(repo.branches["main"])
        self.answer({})

    def preupload(self, body: bytes, name: str, branch: str) -> None:
        repo = self.repo(name, write="create_pr" not in self.query)
        there = repo.commits[repo.commit_of(branch)]
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
                "shouldIgnore": False,
                "oid": there[file["path"]].oid if file["path"] in there else None,
            }
            for file in json.loads(body)["files"]
        ]
        self.answer({"files": files})

    def lfs_batch(self, body: bytes, name: str) -> None:
        wanted = json.loads(body)
        self.repo(name, write="ref" in wanted)  # without a branch it is for a pull request
        for one in (objects := wanted["objects"]):
            if one["oid"] not in self.hub.uploads:
                one["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{one['oid']}"}}
        self.answer({"transfer": "basic", "objects": objects})

    def lfs_put(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            raise Refused(400, "the content does not have the digest it was announced with")
        self.hub.uploads[oid] = body
        self.answer({})

    def commit(self, body: bytes, name: str, branch: str) -> None:
        new_request = "create_pr" in self.query
        repo = self.repo(name, write=not new_request)
        files, message = dict(repo.commits[repo.commit_of(branch)]), ""
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = _regular(base64.b64decode(value["content"]))
            elif line["key"] == "lfsFile":
                oid = value["oid"]
                data, xet = self.hub.uploads.get(oid), self.hub.xet_hash(oid)
                if data is None and xet is None:
                    raise Refused(400, f"LFS pointer pointed to a file that does not exist: {value['path']}")
                files[value["path"]] = Blob(data, value["size"], oid, True, xet)
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        if new_request:
            branch = f"refs/pr/{1 + sum(one.startswith('refs/pr/') for one in repo.branches)}"
        sha = repo.add(branch, files, message)
        address = f"{self.hub.url}/{name}/discussions/{branch.rsplit('/', 1)[-1]}" if new_request else None
        facts = {"commitUrl": f"{self.hub.url}/{name}/commit/{sha}", "commitOid": sha}
        self.answer(facts | {"pullRequestUrl": address})

    # -- pull --------------------------------------------------------------------------------------

    def info(self, body: bytes, name: str, revision: str | None = None) -> None:
        repo, sha = self.revision(name, revision or "main")
        siblings = [{"rfilename": file} for file in sorted(repo.commits[sha])]
        self.answer({"id": name, "sha": sha, "private": repo.private, "siblings": siblings, "tags": []})

    def tree(self, body: bytes, name: str, revision: str, under: str | None = None) -> None:
        repo, sha = self.revision(name, revision)
        if under:
            raise Refused(404, f"{under} does not exist on {revision}", "EntryNotFound")
        rows = []
        for path, blob in sorted(repo.commits[sha].items()):
            row = {"type": "file", "path": path, "size": blob.size, "oid": blob.oid[:40]}
            if blob.large:
                row["lfs"] = {"oid": blob.oid, "size": blob.size, "pointerSize": 130}
            rows.append(row | ({"xetHash": blob.xet} if blob.xet else {}))
        self.answer(rows)

    def resolve(self, body: bytes, name: str, revision: str, file: str) -> None:
        repo, sha = self.revision(name, revision)
        blob = repo.commits[sha].get(file)
        if blob is None:
            raise Refused(404, f"Entry not found: {file}", "EntryNotFound", {"X-Repo-Commit": sha})
        headers = {"X-Repo-Commit": sha, "ETag": f'"{blob.oid}"'}
        if blob.large:
            headers |= {"X-Linked-Etag": f'"{blob.oid}"', "X-Linked-Size": str(blob.size)}
        if blob.xet:
            headers["X-Xet-Hash"] = blob.xet
            headers["X-Xet-Refresh-Route"] = f"{self.hub.url}/api/models/{name}/xet-read-token/{sha}"
        self.answer(blob.data or b"", headers=headers)

    def xet_token(self, body: bytes, name: str, way: str) -> None:
        self.repo(name, write=way == "write" and "create_pr" not in self.query)
        address, end = f"local://{self.hub.store}", int(time.time()) + 3600
        headers = {"X-Xet-Cas-Url": address, "X-Xet-Access-Token": "xet", "X-Xet-Token-Expiration": str(end)}
        self.answer({"casUrl": address, "accessToken": "xet", "exp": end}, headers=headers)


_NAME = r"(?P<name>[\w.-]+/[\w.-]+)"
_MODEL = rf"/api/models/{_NAME}"
ROUTES = {
    r"POST /api/repos/create": Handler.create,
    r"POST /api/validate-yaml": Handler.validate_card,
    rf"POST {_MODEL}/branch/(?P<branch>.+)": Handler.branch,
    rf"POST {_MODEL}/preupload/(?P<branch>.+)": Handler.preupload,
    rf"POST {_MODEL}/commit/(?P<branch>.+)": Handler.commit,
    rf"POST /{_NAME}\.git/info/lfs/objects/batch": Handler.lfs_batch,
    r"PUT /lfs/(?P<oid>\w+)": Handler.lfs_put,
    rf"GET {_MODEL}(/revision/(?P<revision>.+))?": Handler.info,
    rf"GET {_MODEL}/tree/(?P<revision>refs/pr/\d+|[^/]+)(/(?P<under>.+))?": Handler.tree,
    rf"GET {_MODEL}/xet-(?P<way>read|write)-token(/.*)?": Handler.xet_token,
    rf"(GET|HEAD) /{_NAME}/resolve/(?P<revision>refs/pr/\d+|[^/]+)/(?P<file>.+)": Handler.resolve,
}
