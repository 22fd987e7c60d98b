// The few words of JSON Schema that the tools use, and a check of values against them: arguments on the way in, where a host
// may not look, and results on the way out, which must be bounded and without `undefined`.

/** Throws a `TypeError` that says where `value` is not what `schema` says. */
export function check(schema, value, where = 'it') {
  if (schema.anyOf !== undefined) {
    for (const option of schema.anyOf) {
      try {
        return check(option, value, where);
      } catch {
        // The next one may fit.
      }
    }
    throw new TypeError(`${where} is none of what it may be`);
  }
  if (schema.enum !== undefined && !schema.enum.includes(value)) {
    throw new TypeError(`${where} is not one of ${schema.enum.join(', ')}`);
  }
  switch (schema.type) {
    case 'null':
      if (value !== null) throw new TypeError(`${where} is not null`);
      return;
    case 'boolean':
      if (typeof value !== 'boolean') throw new TypeError(`${where} is not true or false`);
      return;
    case 'integer':
      if (!Number.isSafeInteger(value)) throw new TypeError(`${where} is not a whole number`);
      if (value < schema.minimum) throw new TypeError(`${where} is less than ${schema.minimum}`);
      if (value > schema.maximum) throw new TypeError(`${where} is more than ${schema.maximum}`);
      return;
    case 'string':
      if (typeof value !== 'string') throw new TypeError(`${where} is not text`);
      if (value.length < (schema.minLength ?? 0)) throw new TypeError(`${where} is empty`);
      if (value.length > schema.maxLength) throw new TypeError(`${where} is longer than ${schema.maxLength} characters`);
      if (schema.pattern !== undefined && !new RegExp(schema.pattern, 'u').test(value)) {
        throw new TypeError(`${where} has not the right form`);
      }
      return;
    case 'array':
      if (!Array.isArray(value)) throw new TypeError(`${where} is not a list`);
      if (value.length < (schema.minItems ?? 0)) throw new TypeError(`${where} has too few entries`);
      if (value.length > schema.maxItems) throw new TypeError(`${where} has more than ${schema.maxItems} entries`);
      value.forEach((entry, index) => check(schema.items, entry, `${where}[${index}]`));
      return;
    case 'object': {
      if (typeof value !== 'object' || value === null || Array.isArray(value)) throw new TypeError(`${where} is not an object`);
      for (const name of schema.required ?? []) {
        if (!Object.hasOwn(value, name)) throw new TypeError(`${name} is missing`);
      }
      for (const [name, entry] of Object.entries(value)) {
        const known = Object.hasOwn(schema.properties, name) ? schema.properties[name] : undefined;
        if (known === undefined) throw new TypeError(`${name} is not known`);
        check(known, entry, name);
      }
      return;
    }
    default:
      throw new TypeError(`the schema of ${where} is not one`);
  }
}

/** Arguments as a model sends them: `null` for "not given" is what strict hosts make of an optional one. */
export function checkArguments(schema, value) {
  const isObject = typeof value === 'object' && value !== null && !Array.isArray(value);
  const given = isObject
    ? Object.fromEntries(Object.entries(value).filter(([, entry]) => entry !== null && entry !== undefined))
    : value;
  check(schema, given, 'the input');
  return given;
}
