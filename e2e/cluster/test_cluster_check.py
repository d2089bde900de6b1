"""`longshore check` with an agent in a pod that does not start. `test_cluster_moves` checks a deployment that works."""

from __future__ import annotations

from cluster_pods import Placed
from controlplane.waiting import until

_STATUS_LIMIT_S = 60.0


def test_an_agent_without_its_image_is_named(placed: Placed) -> None:
    placed.create(tp=1, agents={"image": "localhost/no-such-agent:1"})

    def said() -> str:
        status, lines = placed.checked()
        assert status == 1
        line = lines.get("images", {})
        return str(line["message"]) if line.get("state") == "error" else ""

    assert "localhost/no-such-agent:1: " in until(said, "the check names the image", _STATUS_LIMIT_S)
