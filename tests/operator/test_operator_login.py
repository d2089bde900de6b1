"""Tests how watches reach the API server from inside a pod."""

from __future__ import annotations

import kopf
import pytest

from longshore_operator import handlers


@pytest.mark.parametrize(
    ("environment", "server"),
    [
        ({"HOST": "10.96.0.1", "PORT": "443"}, "https://10.96.0.1:443"),
        ({"HOST": "fd00::1", "PORT": "6443"}, "https://[fd00::1]:6443"),
        ({}, "https://kubernetes.default.svc"),
    ],
)
def test_watches_use_the_address_that_the_pod_was_told_and_need_no_name_service(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], server: str
) -> None:
    given = kopf.ConnectionInfo(server="https://kubernetes.default.svc", token="t")
    monkeypatch.setattr(kopf, "login_with_service_account", lambda **_: given)
    for part in ("HOST", "PORT"):
        monkeypatch.delenv(f"KUBERNETES_SERVICE_{part}", raising=False)
    for part, value in environment.items():
        monkeypatch.setenv(f"KUBERNETES_SERVICE_{part}", value)
    found = handlers.log_in_with_service_account()
    assert found is not None
    assert (found.server, found.token) == (server, "t")


def test_outside_a_cluster_there_is_no_service_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kopf, "login_with_service_account", lambda **_: None)
    assert handlers.log_in_with_service_account() is None
