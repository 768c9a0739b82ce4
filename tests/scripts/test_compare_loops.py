import json

from compare_loops import main


def test_what_the_loops_came_to_is_stored(tmp_path):
    main(["--loops", "masters", "mlp", "--scale", "small", "--device", "cpu"], tmp_path)
    record = json.loads((tmp_path / "compare_loops.json").read_text())
    result = record["result"]
    assert result["options"] == {"loops": ["masters", "mlp"], "scale": "small", "device": "cpu"}
    assert {row["loop"] for row in result["agreements"]} == {
        "masters, whole",
        "masters, split",
        "masters, prepared",
        "MLP",
    }
    assert all(row["agrees"] for row in result["agreements"])
    assert set(result["mlp"]) == {"fp32", "fp16"}
    assert len(result["mlp"]["fp16"]["losses"]) == 7
    assert result["mlp"]["fp16"]["peak_bytes"] > 2**20
