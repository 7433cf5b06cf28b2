// Where the records of experts lie.
#pragma once
#include "common.cuh"

// Passed by value. Slot s is record s % slots_per_chunk of chunk s / slots_per_chunk; `up` rows follow `gate` rows at the
// start of a record.
struct ExpertPlace {
  u32 slots_per_chunk;
  u32 record_bytes;
  u32 up_bytes;
  u32 down_bytes;
};

// The record of an expert that has a slot.
__device__ __forceinline__ const u8* record_of(const ExpertPlace& place, const u64* chunks, u32 slot) {
  return (const u8*)chunks[slot / place.slots_per_chunk] + (i64)(slot % place.slots_per_chunk) * place.record_bytes;
}
