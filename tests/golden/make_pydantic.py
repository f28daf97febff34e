#!/usr/bin/env python3
"""Writes pydantic.json: the JSON Schemas that Pydantic makes of many types, with texts it takes and refuses.

Each case is a model with one field `v`. `accepts` are JSON texts of `v` that constrained output may
write: Pydantic reads each of them. `rejects` are texts that it must not write: Pydantic refuses each,
but for those of `narrower`, which it would read. `refused`: the schema isn't supported, and the message
has this text. Usage: make_pydantic.py [OUTPUT_FILE]
"""

import dataclasses
import datetime as dt
import decimal
import enum
import ipaddress
import json
import pathlib
import re
import sys
import typing
import uuid
from typing import Annotated, Any, Literal, NamedTuple, Optional, Union

import pydantic
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, conlist, create_model


class Color(enum.Enum):
    red = "red"
    green = "green"
    blue = "blue"


class Level(enum.IntEnum):
    low = 1
    high = 2


class Mixed(enum.Enum):
    one = 1
    x = "x"
    none = None


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=1, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    name: Annotated[str, StringConstraints(max_length=5)]


class Inner(BaseModel):
    x: int
    y: Optional[float] = None


class Node(BaseModel):
    v: int
    children: list["Node"] = []


class Pair(NamedTuple):
    a: int
    b: str


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: int


@dataclasses.dataclass
class Record:
    a: int
    b: list[str]


UNIQUE = "#/properties/v/uniqueItems: isn't supported"
FORMAT = "#/properties/v/format: expected one of date, time"


def case(name, annotation, accepts=(), rejects=(), narrower=(), refused=""):
    return dict(name=name, annotation=annotation, accepts=accepts, rejects=rejects, narrower=narrower, refused=refused)


def texts(*values):
    return [json.dumps(v, ensure_ascii=False) for v in values]


CASES = [
    case("IPvAnyAddress", pydantic.IPvAnyAddress, texts("10.0.0.255", "::1", "fe80::1:2"), texts("10.0.0.256", "1.2.3", "::g")),
    case("IPvAnyInterface", pydantic.IPvAnyInterface, texts("10.0.0.5/8", "10.0.0.5", "::1/128"), texts("10.0.0.5/33", "::1/129")),
    case("IPvAnyNetwork", pydantic.IPvAnyNetwork, texts("10.0.0.0/8", "192.168.1.0/24", "1.2.3.4", "fe80:0::/32"),
         texts("10.0.0.1/8", "1.2.3.4/24", "fe80:1:2::1/32")),
    case("IPv4Address", ipaddress.IPv4Address, texts("0.0.0.0"), texts("::1")),
    case("IPv4Network", ipaddress.IPv4Network, texts("10.1.0.0/16", "1.2.3.4/32"), texts("10.1.2.0/16")),
    case("IPv6Network", ipaddress.IPv6Network, texts("1:2:3:4::/64", "::/128", "1:2:3::/48"), texts("1:2:3::1/48")),
    case("IPv4Interface", ipaddress.IPv4Interface, texts("1.2.3.4/24"), texts("1.2.3.4/40")),
    case("IPv6Interface", ipaddress.IPv6Interface, texts("1::2/64"), texts("1::2/200")),
    case("Base64Bytes", pydantic.Base64Bytes, texts("", "AQ==", "AQI=", "AQID", "+/+/"), texts("A", "AQI"), texts("AR==")),
    case("Base64UrlBytes", pydantic.Base64UrlBytes, texts("", "AQ==", "-_-_"), texts("A")),
    case("bytes", bytes, texts("", "x")),
    case("set of int", set[int], refused=UNIQUE),
    case("set of str", set[str], refused=UNIQUE),
    case("set of bool", set[bool], ["[]", "[true]", "[false, true]"], ["[1,2,3]"], ["[true, true]", "[true, false]"]),
    case("set of enum", set[Color], ["[]", '["red"]', '["red","blue"]', '["red", "green", "blue"]'], ['["x"]'], ['["red","red"]']),
    case("set of literals", Annotated[set[Literal["a", "b", "c", "d"]], Field(min_length=2, max_length=3)],
         ['["a","b"]', '["b", "d"]', '["a","c","d"]'], ["[]", '["a"]', '["a","b","c","d"]', '["a","a"]']),
    case("frozenset of one", Annotated[frozenset[int], Field(max_length=1)], ["[]", "[5]"], ["[1,2]"]),
    case("Json", pydantic.Json, texts("1", "null", '"x"'), ["1"] + texts("x", "")),
    case("Json of list", pydantic.Json[list[int]], texts("[]", "[1, 2]"), texts("[1.5]", "3", '["x"]')),
    case("Json of model", pydantic.Json[Inner], texts('{"x": 1}', '{"x":1,"y":null}'), texts('{"y": 1}')),
    case("Json of Json", pydantic.Json[pydantic.Json[Literal["a"]]], texts(json.dumps('"a"')), texts('"a"')),
    case("float multiple of 0.5", Annotated[float, Field(multiple_of=0.5)], ["0.5", "-3.0", "12.5"], ["0.3", "1.25"], ["3"]),
    case("float multiple of 0.01", Annotated[float, Field(multiple_of=0.01, ge=0, le=100)], ["0.07", "99.99", "100.00", "0.00"],
         ["100.01", "-0.01", "0.005"]),
    case("float multiple of 0.25", Annotated[float, Field(multiple_of=0.25)], ["0.25", "-7.75", "100.50"], ["0.35", "0.26"]),
    case("float multiple of 3", Annotated[float, Field(multiple_of=3.0)], ["3", "-12", "0"], ["4", "1.5"]),
    case("int multiple of 1000", Annotated[int, Field(multiple_of=1000)], ["0", "1000", "-25000"], ["100", "1001"]),
    case("int multiple of 2500", Annotated[int, Field(multiple_of=2500, gt=0, lt=10000)], ["2500", "7500"], ["0", "5100", "10000"]),
    case("int multiple of 7", Annotated[int, Field(multiple_of=7)], ["14", "-21"], ["15"]),
    case("multiple of a prime", Annotated[int, Field(multiple_of=997)], refused="#/properties/v/multipleOf: expected a positive number"),
    case("Decimal", decimal.Decimal, ["1.5", '"1.5"']),
    case("Decimal with bounds", Annotated[decimal.Decimal, Field(ge=0, le=10)], ["10", "0.25", '"7"'], ["11", "-1"]),
    case("date", dt.date, texts("2024-02-28"), texts("2024-13-01", "2024-2-1"), texts("2024-01-31")),
    case("time", dt.time, texts("23:59:59Z", "00:00:00+01:00"), texts("24:00:00Z"), texts("12:00")),
    case("datetime", dt.datetime, texts("2024-02-28T12:00:00Z"), texts("2024-02-28T25:00:00Z")),
    case("AwareDatetime", pydantic.AwareDatetime, texts("2024-02-28T12:00:00-05:30")),
    case("timedelta", dt.timedelta, texts("P3DT4H", "PT1M30S", "P2W"), texts("3 days and a half", "P"), texts("P1Y")),
    case("Literal", Literal["a", 1, True, None], ['"a"', "1", "true", "null"], ['"b"', "2", "false"]),
    case("Enum", Color, ['"red"'], ['"pink"']),
    case("IntEnum", Level, ["1", "2"], ["3", '"low"']),
    case("mixed Enum", Mixed, ["1", '"x"', "null"], ['"one"']),
    case("Optional", Optional[int], ["null", "-5"], ['"x"', "1.5"]),
    case("Optional of Optional", Optional[Optional[Inner]], ["null", '{"x": 1}'], ["{}"]),
    case("list of Optional", Optional[list[Optional[int]]], ["null", "[null, 1]"], ['["x"]']),
    case("discriminated union", Annotated[Union[Cat, Dog], Field(discriminator="kind")],
         ['{"kind": "cat", "lives": 9}', '{"kind":"dog","name":"Rex"}'],
         ['{"kind": "cat", "name": "Rex"}', '{"kind": "cat", "lives": 10}', '{"kind": "cow"}']),
    case("list of unions", list[Annotated[Union[Cat, Dog], Field(discriminator="kind")]], ["[]", '[{"kind":"dog","name":""}]'], ["[{}]"]),
    case("union of models", Union[Cat, Dog], ['{"kind": "cat", "lives": 1}'], ["null"]),
    case("union", Union[int, str, None], ["1", '"x"', "null"], ["[]"]),
    case("dict of int", dict[str, int], ["{}", '{"a": 1, "b":2}'], ['{"a": "x"}']),
    case("dict of model", dict[str, Inner], ['{"a": {"x": 1}}'], ['{"a": {}}']),
    case("dict by enum", dict[Color, int], ["{}", '{"red": 1}'], ['{"pink": 1}']),
    case("dict by UUID", dict[uuid.UUID, int], ['{"00000000-0000-4000-8000-000000000000": 1}'], ['{"x": 1}']),
    case("dict by pattern", dict[Annotated[str, StringConstraints(pattern="^[a-z]+$")], int], ['{"ab": 1}'], ['{"A": 1}']),
    case("dict of any", dict[str, Any], ['{"a": [1, {"b": null}]}']),
    case("dict of two", Annotated[dict[str, int], Field(min_length=2)], refused="#/properties/v/minProperties: expected 0 or 1"),
    case("conlist", conlist(int, min_length=2, max_length=4), ["[1,2]", "[1, 2, 3, 4]"], ["[1]", "[1,2,3,4,5]"]),
    case("tuple", tuple[int, str], ['[1, "x"]'], ["[1]", '["x", 1]', '[1,"x",2]']),
    case("tuple of many", tuple[int, ...], ["[]", "[1,2,3]"], ['["x"]']),
    case("named tuple", Pair, ['[1,"x"]'], ["[1]"]),
    case("deque", typing.Deque[int], ["[1]"], ["{}"]),
    case("pattern", Annotated[str, StringConstraints(pattern=r"^[A-Z]{2}\d{3}$")], texts("AB123"), texts("AB12", "ab123")),
    case("pattern somewhere", Annotated[str, StringConstraints(pattern=r"\d{3}", max_length=8)], texts("x123"), texts("12", "123456789")),
    case("pattern of slugs", Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+(?:-[a-z0-9]+)*$")], texts("a-b-1"), texts("-a", "a--b")),
    case("pattern that ignores case", Annotated[str, StringConstraints(pattern=r"(?i)^yes$")], refused="#/properties/v/pattern: "),
    case("length", Annotated[str, StringConstraints(min_length=2, max_length=3)], texts("ab", "äöü"), texts("a", "abcd")),
    case("HttpUrl", pydantic.HttpUrl, texts("https://example.com/a?b=c"), texts("example.com")),
    case("PostgresDsn", pydantic.PostgresDsn, refused=FORMAT),
    case("UUID", uuid.UUID, texts("01234567-89ab-cdef-0123-456789abcdef"), texts("01234567")),
    case("UUID4", pydantic.UUID4, texts("01234567-89ab-4def-8123-456789abcdef"), texts("01234567-89ab-1def-8123-456789abcdef")),
    case("UUID7", pydantic.UUID7, texts("01234567-89ab-7def-8123-456789abcdef"), texts("01234567-89ab-4def-8123-456789abcdef")),
    case("Path", pathlib.Path, texts("a/b")),
    case("SecretStr", pydantic.SecretStr, texts("x")),
    case("Pattern", re.Pattern, texts("^[a-z]+[0-9]{3}$", "a.b*"), texts("(", "[a"), texts("(a|b)")),
    case("ByteSize", pydantic.ByteSize, ["5"], ["-5"]),
    case("PositiveInt", pydantic.PositiveInt, ["1"], ["0"]),
    case("confloat", Annotated[float, Field(gt=-1.5, lt=2.25)], ["-1.4", "2.2499"], ["-1.5", "2.25"]),
    case("int32", Annotated[int, Field(json_schema_extra={"format": "int32"})], ["-2147483648"], ['"x"'], ["2147483648"]),
    case("uint8", Annotated[int, Field(json_schema_extra={"format": "uint8"}, ge=200)], ["255"], ["199"], ["256"]),
    case("double", Annotated[float, Field(json_schema_extra={"format": "double"})], ["1.5"], ['"x"']),
    case("int of an unknown format", Annotated[int, Field(json_schema_extra={"format": "money"})], refused="#/properties/v/format: of integers"),
    case("extension", Annotated[int, Field(json_schema_extra={"x-order": 1})], ["1"], ["null"]),
    case("unknown format", Annotated[str, Field(json_schema_extra={"format": "phone"})], refused=FORMAT),
    case("unknown keyword", Annotated[str, Field(json_schema_extra={"contains": 1})], refused="#/properties/v/contains"),
    case("nested model", Inner, ['{"x": 1, "y": null}', '{"x":1}'], ["{}"]),
    case("recursive model", Node, ['{"v": 1, "children": [{"v": 2}]}'], ['{"v": 1, "children": [{}]}']),
    case("dataclass", Record, ['{"a": 1, "b": ["x"]}'], ['{"a": 1}']),
    case("closed model", Closed, ['{"a": 1}'], ['{"a": 1, "b": 2}']),
    case("any", Any, ["1", '[{"a": null}]']),
    case("bool", bool, ["true"], ["[]"]),
    case("None", None, ["null"], ["1"]),
]


def reads(model, text):
    try:
        model.model_validate_json('{"v": ' + text + "}")
        return True
    except pydantic.ValidationError:
        return False


def main():
    out = []
    for c in CASES:
        model = create_model("M", v=(c["annotation"], ...))
        for text in [*c["accepts"], *c["narrower"]]:
            assert reads(model, text), (c["name"], text)
        for text in c["rejects"]:
            assert not reads(model, text), (c["name"], text)
        out.append({"name": c["name"], "schema": model.model_json_schema(), "accepts": list(c["accepts"]),
                    "rejects": [*c["rejects"], *c["narrower"]], "refused": c["refused"]})
    default = pathlib.Path(__file__).parent / "pydantic.json"
    path = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else default
    lines = ",\n".join(json.dumps(x, ensure_ascii=False) for x in out)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(f"{len(out)} schemas of Pydantic {pydantic.VERSION}")


if __name__ == "__main__":
    main()
